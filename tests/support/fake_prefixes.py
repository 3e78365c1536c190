"""A prefix store that fails in every way, and a courier that comes back when it is told to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from fake_runner import FakeRunner

from motley.replicas.engine.kv_reuse.prefix_connector import PrefixConnector
from motley.replicas.kv.host_blocks import LentBlockPool
from motley.replicas.kv.prefix.store_link import StoreLink
from motley.replicas.kv.store.fetch_cost import FetchCostModel
from motley.replicas.kv.store.host_kv import RecordPayloads
from motley.replicas.kv.store.memory_store import MemoryPrefixStore
from motley.replicas.kv.store.prefix_store import Buffer, ValueParts, ValueQuery
from motley.replicas.kv.store.sealed_record import Geometry, RecordSealer
from motley.replicas.kv.store.store_keys import StoreKeys
from motley.replicas.kv.store.store_ops import FetchOp, StoreOp
from motley.replicas.kv.store.store_worker import StoreOpExecutor
from motley.replicas.types import BLOCK_TOKENS

SECRET = b"a secret of the tests alone, 32 bytes"


class Done:
    def wait(self) -> None:
        return None


class CellRecords:
    """Implements HostRecords over the host's blocks of a runner whose KV is token ids."""

    def __init__(self, runner: FakeRunner, geometry: Geometry) -> None:
        self._kept, self._geometry = runner.kept, geometry

    def allocate_payloads(self) -> RecordPayloads:
        return RecordPayloads(self._geometry, self._geometry.heads)

    def pack(self, blocks: Sequence[int], payloads: RecordPayloads) -> bool:
        cells = [cell for block in blocks for cell in self._kept[block]]
        payloads.numbers[:] = torch.tensor(cells, dtype=torch.float32)[:, None]
        return -1 not in cells

    def unpack(self, payloads: RecordPayloads, blocks: Sequence[int]) -> bool:
        cells = [int(cell) for cell in payloads.numbers[0, 0, 0, :, 0].tolist()]
        for i, block in enumerate(blocks):
            self._kept[block] = cells[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]
        return True


class TurnCourier:
    """Does an operation when it is asked for the so-manyth time whether it is back; `lost`: it never comes back."""

    def __init__(self, executor: StoreOpExecutor[RecordPayloads], turns: Callable[[], int] = lambda: 0) -> None:
        self.executor, self.turns = executor, turns
        self.sent: list[StoreOp] = []
        self.under_way: list[list[object]] = []
        self.lost: Callable[[StoreOp], bool] = lambda store_op: False
        self._buffers = executor.make_buffers()

    @property
    def away(self) -> bool:
        return self.executor.away

    def send(self, store_op: StoreOp) -> None:
        self.sent.append(store_op)
        self.under_way.append([self.turns(), store_op])

    def take(self) -> list[StoreOp]:
        back = []
        for entry in list(self.under_way):
            left, store_op = entry
            if self.lost(store_op):  # type: ignore[arg-type]
                continue
            if left:
                entry[0] -= 1  # type: ignore[operator]
                continue
            self.under_way.remove(entry)
            self.executor.do(store_op, self._buffers)  # type: ignore[arg-type]
            back.append(store_op)
        return back  # type: ignore[return-value]

    def wait(self, seconds: float) -> None:
        return None

    def close(self) -> None:
        return None

    @property
    def fetches(self) -> list[FetchOp]:
        return [store_op for store_op in self.sent if isinstance(store_op, FetchOp)]


FAULTS = ("none", "miss", "raise", "few", "many", "late", "flip", "cut", "other", "zeros", "empty")


class BadStore(MemoryPrefixStore):
    """Each call takes its fault from `fault`, the word for it; the clock is moved by what comes too late.

    gone: nobody is asked any more
    """

    def __init__(self, clock: Callable[[], float], fault: Callable[[], str] = lambda: "none", seed: int = 0) -> None:
        super().__init__(2**24, clock)
        self.fault, self._random = fault, random.Random(seed)
        self.gone = False

    def get(
        self, wanted: Sequence[ValueQuery], deadline: float, buffer: memoryview | None = None
    ) -> Sequence[ValueParts | None]:
        fault = self.fault()
        found = list(super().get(wanted, deadline))
        if fault == "raise":
            raise ConnectionError("told to")
        if fault == "miss" or self.gone:
            return [None] * len(wanted)
        if fault == "few":
            return found[:-1]
        if fault == "many":
            return [*found, None]
        if fault == "late":
            self._clock.now += 1e3  # type: ignore[attr-defined]
            return [None] * len(wanted)
        return [value and self._spoilt(fault, value, wanted[i]) for i, value in enumerate(found)]

    def _spoilt(self, fault: str, value: ValueParts, wanted: ValueQuery) -> ValueParts:
        [data] = [bytearray(part) for part in value]
        if fault == "flip":
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        elif fault == "cut":
            del data[self._random.randrange(len(data)) :]
        elif fault == "other":
            others = [key for key in self._values if key != wanted.key]
            return (self._values[self._random.choice(others)].data,) if others else value
        elif fault == "zeros":
            return (bytes(len(data)),)
        elif fault == "empty":
            return (b"",)
        return (bytes(data),)

    @property
    def away(self) -> bool:
        return self.gone

    def count_stored(self, wanted: Sequence[ValueQuery], owner: str, deadline: float) -> int | None:
        if self.gone:
            return None
        if self.fault() == "raise":
            raise ConnectionError("told to")
        return super().count_stored(wanted, owner, deadline)

    def claim(self, wanted: ValueQuery, deadline: float, *, anew: bool = False) -> bool:
        if self.fault() == "raise":
            raise ConnectionError("told to")
        return self.gone or super().claim(wanted, deadline, anew=anew)

    def put(self, key: bytes, parts: Sequence[Buffer], owner: str) -> bool:
        fault = self.fault()
        if fault == "raise":
            raise ConnectionError("told to")
        return fault != "miss" and not self.gone and super().put(key, parts, owner)


def prefixes(
    runner: FakeRunner,
    store: MemoryPrefixStore,
    clock: Callable[[], float],
    *,
    room: int = 64,
    first: int = 0,
    value_blocks: int = 1,
    after: int = 1,
    identity: bytes = b"this model",
    turns: Callable[[], int] = lambda: 0,
    token_s: float | None = 1e9,
) -> tuple[PrefixConnector, TurnCourier]:
    """For a fake runner: its host's blocks from `first` on, `room` of them. token_s: None is not known."""
    geometry = Geometry("float32", 1, 2, 1, value_blocks * BLOCK_TOKENS)
    store_worker = TurnCourier(
        StoreOpExecutor(store, RecordSealer(SECRET, geometry), CellRecords(runner, geometry), clock=clock), turns
    )
    link = StoreLink(
        store_worker=store_worker,
        keys=StoreKeys(SECRET, identity),
        pool=LentBlockPool(room, first),
        mark=Done,
        value_blocks=value_blocks,
        value_bytes=geometry.size,
        after=after,
    )
    found = PrefixConnector(link, clock)
    found.cost_model = None if token_s is None else FetchCostModel(token_s, block_s=1e-9)
    return found, store_worker
