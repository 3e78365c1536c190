"""One rank of some: `python exchange_child.py DESCRIPTOR RANK SIZE CAPACITY TIMEOUT_S WHAT [COUNT]`.

Says "ready", waits for a line, and then:

    check   COUNT exchanges of random shapes, each held against what all ranks' numbers come to
    gloo    the same through gloo, whose ranks meet in the file that comes next
    idle    takes part in one sum, and in no other
    sums    one sum after the other until they fail; says how
    busy    two sums, between which the last rank computes for four times as long as the others wait for one that hangs
"""

from __future__ import annotations

import random
import sys
import time

import torch
import torch.distributed as dist

from motley.kernels.cpu.c_kernels.shm_collectives import RankLost, ShmCollectives
from motley.replicas.model.sharding.rank_shares import Exchange
from motley.replicas.parallel.transport.collective import CollectiveExchange
from motley.replicas.parallel.transport.rendezvous import join_group


def made(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def through_gloo(store: str, rank: int, size: int) -> CollectiveExchange:
    return CollectiveExchange(join_group(dist.FileStore(store, size), "test", 0, rank, size, torch.device("cpu"), None))


def check(exchange: Exchange, rank: int, size: int, count: int) -> None:
    rng = random.Random(0)  # the same on every rank
    for number in range(count):
        rows, dtype = rng.choice([1, 3, 17, 300]), rng.choice([torch.float32, torch.bfloat16])
        if rng.random() < 0.5:
            shape = (rows, rng.choice([1, 15, 64, 900]))
            parts = [made(number * size + each, shape, dtype) for each in range(size)]
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            found = exchange.sum(parts[rank].clone())
            # Of two, in whatever order, sums are the same to the bit.
            assert torch.equal(found, total.to(dtype))
        else:
            widths = [rng.choice([0, 1, 7, 500]) for _ in range(size - 1)] + [3]
            parts = [made(number * size + each, (rows, width), dtype) for each, width in enumerate(widths)]
            assert torch.equal(exchange.gather(parts[rank], widths), torch.cat(parts, dim=1))
        if isinstance(exchange, CollectiveExchange):
            first = made(number, (rows,), dtype)
            assert torch.equal(exchange.broadcast(first.clone() if rank == 0 else torch.zeros_like(first)), first)


def main() -> None:
    descriptor, rank, size, capacity, timeout_s, what, *rest = sys.argv[1:]
    torch.set_num_threads(1)
    exchange = ShmCollectives(int(descriptor), int(rank), int(size), capacity=int(capacity), timeout_s=float(timeout_s))
    print("ready", flush=True)
    sys.stdin.readline()
    if what in ("check", "gloo"):
        by: Exchange = through_gloo(rest[1], int(rank), int(size)) if what == "gloo" else exchange
        check(by, int(rank), int(size), int(rest[0]))
        print("same", flush=True)
        return
    exchange.sum(torch.ones(8))
    print("summed", flush=True)
    if what == "idle":
        time.sleep(60)
    began = time.monotonic()
    if what == "busy":
        while int(rank) == int(size) - 1 and time.monotonic() - began < 4 * float(timeout_s):
            pass
        exchange.sum(torch.ones(8))
        print(f"summed after {time.monotonic() - began:.3f} s", flush=True)
        return
    try:
        while True:
            began = time.monotonic()
            exchange.sum(torch.ones(8))
    except RankLost as error:
        print(f"lost after {time.monotonic() - began:.3f} s: {error}", flush=True)


if __name__ == "__main__":
    main()
