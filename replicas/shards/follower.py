"""A process other than the first, which computes what the first process sends.

Messages and answers go by pipes, and each question is answered when it is done. The first process sends in turn: which
model it is, for which this process reports what that costs on its own device; which layers to load; when to meet the
other ranks; how many KV blocks to allocate; and then calls of the decoder. Ranks of the first stage send no results. A
later stage receives hidden states from the stage before it by a pipe of its own, and the last stage sends results to
the first process.

Each process sends heartbeats all the time, and the reason if it ends. Between calls it may be sent other weights to be
prepared, which it answers, or to be dropped; and copies of KV to or from the host, which it reports when they are done.
Ranks of a single stage on GPUs follow the first rank's calls and graphs by `follow_calls`.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from ...kernels.cpu.c_kernels.shm_collectives import ShmCollectives
from ...kernels.ops import Ops
from .. import sizing
from ..checkpoint import inspect_checkpoint
from ..engine_config import EngineConfig
from ..errors import CheckpointError, EngineLost, InvalidRequest
from ..gpu.accelerator import Accelerator, AtOnce, Copier, accelerator_of
from ..gpu.swapper import Swapper
from ..known import Known, known_of
from ..updates.beside import Beside
from ..weights_cache import open_cache
from . import agreement, calls
from .arrivals import Arrivals
from .beats import Beats
from .collective import CollectiveExchange
from .gpu_follower import follow_calls
from .gpu_stage import OnDevice
from .host import SharedHost
from .hosts import temporary_here
from .meeting import join, store_of
from .pipe import Inbox, Pipe
from .places import account_here
from .ranks import Ranks
from .readers import Readers
from .refusals import told_error
from .split import split
from .stages import Stage, stages_of
from .versions import Versions

log = logging.getLogger(__name__)

AnyExchange = ShmCollectives | CollectiveExchange
# Shortest standstill that is reported on a GPU: in a first call kernels are compiled by other processes meanwhile.
COMPILES_S = 30.0

Copy = Callable[[dict[str, Any]], None]
Between = Callable[[dict[str, Any]], bool]  # handles a message that is no call and returns True; False for a call


def serve(pipe: Pipe, ends: Mapping[str, int], beats: Beats) -> None:
    """Compute what the first process sends, until it closes its end. Raises whatever a step raises, after sending the
    reason.

    ends  file descriptors by name: `memory` for the ranks' exchange, or `meeting` for the file where they meet;
          `before` and `after` to receive from the stage before and to send to the one after, if any; and `host`, a file
          for the host's KV
    """
    start, _ = pipe.receive()
    exchange: AnyExchange | None = None
    if start["meets"] is not None:
        exchange = CollectiveExchange()
    elif "memory" in ends:
        exchange = ShmCollectives(ends["memory"], start["rank"], start["size"])
        os.close(ends["memory"])
    elif start["size"] > 1:
        raise RuntimeError(f"{start['name']} shares no memory with the other ranks: it has to be on their node")
    arrivals = Arrivals(pipe)
    try:
        _compute(pipe, start, ends, exchange, beats, arrivals)
    except EOFError:
        log.info("%s ends with the process that started it", start["name"])
    except Exception as error:
        with suppress(EngineLost, OSError):
            refused = {"refused": told_error(error), "where": f"{start['folder']} on {socket.gethostname()}"}
            is_refusal = isinstance(error, (CheckpointError, InvalidRequest))
            pipe.send({"why": f"{type(error).__name__}: {error}", **(refused if is_refusal else {})})
        raise
    finally:
        arrivals.close()
        if exchange is not None:
            exchange.abort()


def _compute(
    pipe: Pipe, start: dict[str, Any], ends: Mapping[str, int], exchange: AnyExchange | None, beats: Beats,
    arrivals: Arrivals,
) -> None:  # fmt: skip
    from ..build import operators, outline_operators
    from ..model import load_model

    size, folder = start["size"], Path(start["folder"])
    config = EngineConfig(**start["config"])
    torch.set_num_threads(config.threads or 1)
    checkpoint = inspect_checkpoint(folder)
    ops, _ = operators(config, checkpoint.config.dtype)
    accelerator = accelerator_of(ops.device)
    outline = partial(outline_operators, config, checkpoint.config.dtype, ops)
    account = account_here(checkpoint, config, ops, outline, on_device=accelerator is not None, chosen=start["chosen"])
    cache = open_cache(config.weights_cache)
    known = known_of(checkpoint, cache)
    model = agreement.told(checkpoint, known, start)
    beats.says("waits to be told its layers")
    pipe.send({"account": asdict(account), "model": model, "temporary": temporary_here()})
    told, _ = pipe.receive()
    layers, together, number = told["layers"], tuple(told["digest"]), start["stage"] * size + start["rank"]
    readers = Readers(tuple(layers), size, together, number) if together else None
    ranks = None
    if exchange is not None:
        parts = [split(checkpoint.config, checkpoint.format, each, size) for each in range(size)]
        ranks = Ranks(parts, start["rank"], exchange)
    stage = stages_of(checkpoint.config.num_layers, layers)[start["stage"]]
    of_all = Known(fingerprint=start["fingerprint"] or ("" if readers else known.fingerprint), readers=readers)
    beats.says("loads weights")
    loaded = load_model(
        folder, ops, progress=beats.of_bytes, ranks=ranks, stage=stage, cache=cache, known=of_all, copier=accelerator
    )
    beats.says("waits for the others to load")
    torch.set_num_threads(ops.torch_threads)
    pipe.send({"digests": [digest.hex() for digest in loaded.digests]})
    of_kv, _ = pipe.receive()
    if isinstance(exchange, CollectiveExchange):
        with beats.during("meets the other ranks"):
            _meet(exchange, start, ends, ops)
    # shares: whether there is a prefix store is known to the first process alone, so that one is assumed.
    blocks, _ = sizing.num_blocks(config, loaded, ops, shares=True, **of_kv)
    pipe.send({"blocks": blocks, "arithmetic": ops.arithmetic})
    local = loaded.decoder.local
    room, _ = pipe.receive()
    if "remember" in room:
        agreement.remember(cache, checkpoint, known, room["remember"])
        room, _ = pipe.receive()
    beats.says("makes room for KV")
    kv = ops.allocate_kv(local.num_layers, room["blocks"], local.num_kv_heads, local.head_dim)
    cells = [part for cache in kv for part in ops.kv_parts(cache)]
    copy = _copier(pipe, cells, accelerator or AtOnce(), ends.get("host"), room["host_blocks"])
    if accelerator is not None:
        loaded.decoder.rotary.reserve(room["tokens"])  # graphs contain the table's address, which must not change
    beats.says("serves")
    pipe.send(room)
    if loaded.keep is not None:
        loaded.keep(room["fingerprint"])
        loaded = replace(loaded, keep=None)  # it refers to the weights that it has written
    if accelerator is None:
        versions = Versions(loaded, ranks)
    else:
        versions = Versions(loaded, ranks, Beside(accelerator, sizing.step_bytes(config, loaded)).updated_model)
    del loaded  # this reference would keep the weights in memory when their version is dropped
    between = _between(pipe, versions, copy, arrivals)
    shares_steps = stage.count == 1 and start["meets"] is None  # then the ranks' exchange detects a rank that hangs
    if not shares_steps:
        beats.of_this_thread(0.0 if accelerator is None else COMPILES_S)
    if accelerator is not None and stage.count == 1:
        assert isinstance(exchange, CollectiveExchange), "ranks on GPUs meet"
        follow_calls(pipe, versions, kv, exchange, accelerator, between)
    if stage.count > 1:
        _stage(pipe, start, ends, versions, stage, kv, between, accelerator)
    assert ranks is not None, "a stage alone has ranks"
    # Where files of weights may be sent, a thread always reads, so that the sender need not wait for a step.
    _rank(pipe if shares_steps else Inbox(pipe, "calls"), versions, kv, between)


def _meet(exchange: CollectiveExchange, start: dict[str, Any], ends: Mapping[str, int], ops: Ops) -> None:
    address = start["meets"].get("address")
    store = store_of(ends.get("meeting"), None if address is None else (address[0], address[1]))
    host = None if address is None else address[0]
    exchange.join(join(store, start["meets"]["name"], start["stage"], start["rank"], start["size"], ops.device, host))


def _copier(pipe: Pipe, parts: Sequence[torch.Tensor], copier: Copier, file: int | None, host_blocks: int) -> Copy:
    """Return a function that makes copies between KV and the host, and reports them.

    file  descriptor of the file for the host's blocks, which is closed here; None if there is none
    """
    assert file is not None or not host_blocks, "there is memory to be shared"
    swapper = None
    if file is not None and host_blocks:
        host = SharedHost(file)
        copier.pin(host.memory)
        swapper = Swapper(parts, copier, host_blocks, host.staging)
    if file is not None:
        os.close(file)

    def copy(fields: dict[str, Any]) -> None:
        assert swapper is not None, "there are blocks of the host"
        swapper.swap(calls.copies_of(fields))
        swapper.mark().wait()  # the next call may read the blocks copied in, and overwrite those copied out
        swapper.forget()
        pipe.send({"copied": fields["copies"]})

    return copy


def _between(pipe: Pipe, versions: Versions, copy: Copy, arrivals: Arrivals) -> Between:
    def heed(fields: dict[str, Any]) -> bool:
        if "copies" in fields:
            copy(fields)
        elif "prepare" in fields:  # by another thread, so that steps go on
            threading.Thread(target=_prepare, args=(pipe, versions, fields), name="weights", daemon=True).start()
        elif "forget" in fields:
            versions.forget(fields["forget"])
            arrivals.sweep(fields["settled"], versions.files())
        else:
            return False
        return True

    return heed


def _rank(orders: Pipe | Inbox, versions: Versions, kv: list[torch.Tensor], between: Between) -> NoReturn:
    """Make calls in their order, each with the version of the weights that it names, until the pipe ends."""
    while True:
        fields, tensors = orders.receive()
        if not between(fields):
            calls.make(versions.decoder(fields["weights"]), kv, fields, tensors)


def _stage(
    pipe: Pipe, start: dict[str, Any], ends: Mapping[str, int], versions: Versions, stage: Stage,
    kv: list[torch.Tensor], between: Between, accelerator: Accelerator | None,
) -> NoReturn:  # fmt: skip
    """Make calls in their order, each with the version of the weights that it names and with what the stage before has
    computed of it, until the pipe ends.
    """
    before = Inbox(Pipe(reads=ends["before"]), "stage before") if "before" in ends else None
    hand_on = _hand_on(pipe, start, ends, stage)
    make: Callable[..., calls.Found] = calls.make
    if accelerator is not None:
        make = OnDevice(accelerator, wanted=not (stage.is_last and start["rank"])).make
    orders = Inbox(pipe, "calls")
    while True:
        fields, tensors = orders.receive()
        if between(fields):
            continue
        whole = before is None or "hidden" in tensors  # then the first process has sent all of the input
        stream = None if whole or before is None else calls.stream_of(before.receive())
        hand_on(make(versions.decoder(fields["weights"]), kv, fields, tensors, stream))


def _hand_on(pipe: Pipe, start: dict[str, Any], ends: Mapping[str, int], stage: Stage) -> Callable[[Any], None]:
    """Return the function that sends on what a call has computed: to the next stage, or from one rank of the last stage
    to the first process.
    """
    if not stage.is_last:
        after = Pipe(writes=ends["after"])
        return lambda stream: after.send(*calls.stream_message(stream))
    if start["rank"]:
        return lambda found: None
    return lambda found: pipe.send({}, {"found": found.contiguous()})


def _prepare(pipe: Pipe, versions: Versions, fields: dict[str, Any]) -> None:
    """Prepare new weights and report whether that worked. The weights that steps are computed with stay as they are in
    either case.
    """
    try:
        versions.prepare(fields["prepare"], Path(fields["file"]))
        pipe.send({"prepared": fields["prepare"]})
    except Exception as error:
        log.exception("weights of version %d could not be prepared", fields["prepare"])
        pipe.send({"failed": told_error(error)})
