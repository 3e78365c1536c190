"""An accelerator that is not there: it does all that it is given as late as it may, on the CPU.

What is submitted runs only when the host waits for it, so that whatever the host changes too early is seen too late.
Copies run only when something that is submitted must follow them; or, by choice, as early as they may.
What is made aside has garbage in it until its mark is waited for.
A capture keeps the operators that torch dispatched, with their tensors and numbers as they were: replayed, no line of
Python runs again, as with a CUDA graph.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from motley.kernels.batch import StepBatch
from motley.kernels.cpu import torch_attention
from motley.kernels.cpu.cpu_ops import CpuOps
from motley.kernels.sampling import sample_reference
from motley.kernels.sampling.sample import PenaltyRows, SamplingRows

T = TypeVar("T")

_GARBAGE = 0xA5
# On a GPU the host waits for these: for a number itself, or for how large the result is.
_NEED_NUMBERS = {"item", "_local_scalar_dense", "nonzero", "_unique", "_unique2", "unique_dim", "masked_select"}


class LateDevice:
    """waits: how often the host had to wait for something to be done.

    early     copies are made as they are given; before steps on their way, unless they are to come after
    recorded  False: a replay runs Python again, as kernels need that Triton's interpreter computes
    free      bytes, as it says
    """

    free = 1 << 40

    def __init__(self, *, recorded: bool = True, early: bool = False) -> None:
        self._recorded = recorded
        self._early = early
        self._copies: list[tuple[Callable[[], None], _Mark | None]] = []
        self._copied = 0
        self.device = torch.device("cpu")
        self.apart = True
        self.waits = 0
        self.captures = 0
        self._graphs: WeakSet[_Recorder] = WeakSet()
        self._queue: list[Callable[[], None]] = []
        self._done = 0
        self._at_work = False
        self._making = threading.local()
        self._lock = threading.RLock()  # whoever waits does the work: other threads may, of which a GPU has no need

    def staging(self, size: int) -> torch.Tensor:
        with _disable_current_modes():  # the host's is written at once
            return torch.full((size,), _GARBAGE, dtype=torch.uint8)

    def pin(self, memory: torch.Tensor) -> None:
        with _disable_current_modes():
            memory.fill_(_GARBAGE)

    def trim(self) -> None:
        return None

    def moved(self, values: torch.Tensor) -> torch.Tensor:
        assert self._at_work, "a copy is work as any other"
        return values.clone()

    def submit(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._queue.append(work)

    def mark(self) -> _Mark:
        with self._lock:
            if getattr(self._making, "aside", False):  # in that order, in which all is done
                return _Mark(self, 0)
            return _Mark(self, self._done + len(self._queue))

    def copy(self, work: Callable[[], None], after: _Mark | None = None) -> _CopyMark:
        with self._lock:
            self._copies.append((work, after))
            mark = _CopyMark(self, self._copied + len(self._copies))
        if self._early:
            mark.wait()
        return mark

    def follow(self, mark: _CopyMark) -> None:
        self.submit(mark.wait)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        self.run(self._done + len(self._queue))
        with torch.inference_mode():
            work()
            if not self._recorded:
                return work
            with _Recorder() as recorder:
                work()
        self._graphs.add(recorder)
        return recorder.replay

    @property
    def graphs(self) -> list[_Recorder]:
        """Return the graphs that were captured and have not been freed."""
        return [graph for graph in self._graphs if graph.calls]

    def free_graphs(self) -> None:
        for graph in list(self._graphs):
            graph.reset()

    def aside(self, work: Callable[[], T]) -> tuple[T, _Aside]:
        self._making.aside = True
        try:
            with _Made() as made_here:  # in this thread: another may be at work on steps meanwhile
                made = work()
        finally:
            self._making.aside = False
        return made, _Aside(made_here.left())

    def free_bytes(self) -> int:
        return self.free

    @torch.inference_mode()
    def run(self, until: int) -> None:
        with self._lock:
            while self._done < until:
                work = self._queue.pop(0)
                self._done += 1
                self._do(work)

    @torch.inference_mode()
    def run_copies(self, until: int) -> None:
        with self._lock:
            while self._copied < until:
                work, after = self._copies.pop(0)
                if after is not None:
                    self.run(after._at)
                self._copied += 1
                self._do(work)

    def _do(self, work: Callable[[], None]) -> None:
        before, self._at_work = self._at_work, True
        try:
            work()
        finally:
            self._at_work = before

    def wait(self, until: int) -> None:
        self.waits += until > self._done
        self.run(until)


class _Mark:
    def __init__(self, device: LateDevice, at: int) -> None:
        self._device, self._at = device, at

    def wait(self) -> None:
        self._device.wait(self._at)


class _CopyMark:
    def __init__(self, device: LateDevice, at: int) -> None:
        self._device, self._at = device, at

    def wait(self) -> None:
        self._device.run_copies(self._at)


class _Aside:
    """Tensors whose values come into their memory when somebody waits for them."""

    def __init__(self, memory: list[torch.Tensor]) -> None:
        self._late = [(each, each.clone()) for each in memory]
        for each in memory:
            each.fill_(_GARBAGE)

    def wait(self) -> None:
        for there, made in self._late:
            there.copy_(made)
        self._late = []


def storages() -> dict[int, torch.Tensor]:
    """The memory of every tensor that there is, as bytes, by its address."""
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    here = [each.untyped_storage() for each in tensors if each.device.type == "cpu" and each.layout is torch.strided]
    found = {each.data_ptr(): each for each in here if each.nbytes()}
    return {address: torch.empty(0, dtype=torch.uint8).set_(each) for address, each in found.items()}


class _Made(TorchDispatchMode):
    """The memory of what operators gave, and were not given."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages_in((args, kwargs))}
        for storage in _storages_in(out):
            if storage._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage)
        return out

    def left(self) -> list[torch.Tensor]:
        """Return the memory as bytes. An address may be somebody else's by now."""
        found = [torch.UntypedStorage._new_with_weak_ptr(each.cdata) for each in self._made.values()]
        return [torch.empty(0, dtype=torch.uint8).set_(each) for each in found if each is not None and each.nbytes()]


def _storages_in(values: Any) -> list[torch.UntypedStorage]:
    return [each.untyped_storage() for each in tree_flatten(values)[0] if isinstance(each, torch.Tensor)]


class _Recorder(TorchDispatchMode):
    """A captured graph."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in _NEED_NUMBERS, f"the host reads a number in a capture: {func}"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        assert self.calls, "no graph is launched that was freed"
        for func, args, kwargs, out in self.calls:
            repeated = func(*args, **kwargs)
            for old, new in zip(tree_flatten(out)[0], tree_flatten(repeated)[0], strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def reset(self) -> None:
        """Free the graph whoever refers to it, as torch's `CUDAGraph.reset` does."""
        self.calls = []


@torch.library.custom_op("motley_tests::attention", mutates_args=())
def _attention(
    q: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    """Compute like a kernel: lengths are read from memory when it runs."""
    count = len(lengths)
    empty = lengths[:0].long()
    batch = StepBatch(
        empty, empty, empty, tuple(range(count + 1)), tuple(lengths.tolist()), tables.clone(), empty, count
    )
    return torch_attention.attention(q, cache, batch, scale, window or None)


@torch.library.custom_op("motley_tests::sample", mutates_args=())
def _sample(
    logits: torch.Tensor, asked: Sequence[torch.Tensor], filtered: bool, own: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = SamplingRows(*(row.clone() for row in asked))
    if not filtered:  # then kernels leave filters out
        rows = replace(rows, top_k=torch.zeros_like(rows.top_k), top_p=torch.ones_like(rows.top_p))
    tokens = torch.tensor(sample_reference.choose_tokens(logits, rows), dtype=torch.int64)
    return tokens, sample_reference.logprob(own, tokens).float()


class LateOps(CpuOps):
    """A CPU's operators in torch alone; attention that a graph can hold."""

    def __init__(self) -> None:
        super().__init__(torch.float32, "exact", None, None, "tests")

    def attention(
        self, q: torch.Tensor, cache: torch.Tensor, batch: StepBatch, scale: float, window: int | None
    ) -> torch.Tensor:
        if batch.lengths is None:
            return super().attention(q, cache, batch, scale, window)
        out: torch.Tensor = _attention(q, cache, batch.block_tables, batch.lengths, scale, window or 0)
        return out

    @staticmethod
    def sample(
        logits: torch.Tensor, rows: SamplingRows, filtered: bool, own: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        asked = [getattr(rows, name) for name in rows.__slots__]
        found: tuple[torch.Tensor, torch.Tensor] = _sample(logits, asked, filtered, logits if own is None else own)
        return found

    @staticmethod
    def penalised(logits: torch.Tensor, history: torch.Tensor, rows: PenaltyRows) -> torch.Tensor:
        return sample_reference.penalize(logits, history, rows)
