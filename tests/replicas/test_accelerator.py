"""Requests to a GPU, as far as they can be seen without one."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from motley.kernels.device.device_context import DeviceContext
from motley.kernels.device.device_table import DEVICES
from motley.kernels.device.precision import policy_of
from motley.kernels.gpu.gpu_ops import GpuOps
from motley.replicas.execution.block_copies import StagedBlockCopy
from motley.replicas.gpu.accelerator import CudaAccelerator, copy_to_host
from motley.replicas.gpu.packed_transfer import NUM_SLOTS, PackedTransfer


class FakeStream:
    def __init__(self, device: Any = None) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


class FakeGraph:
    freed = False

    def replay(self) -> None: ...

    def reset(self) -> None:
        self.freed = True


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """A torch that has a GPU to all appearances; the streams that were used, and how a graph on them was asked for."""
    used: list[tuple[Any, dict[str, Any]]] = []

    def graph(graph: Any, stream: Any = None, **asked: Any) -> Any:
        used.append((stream, asked))
        return nullcontext()

    def stream(stream: Any) -> Any:
        used.append((stream, {}))
        return nullcontext()

    fakes = {
        "Stream": FakeStream, "stream": stream, "current_stream": FakeStream, "graph": graph, "CUDAGraph": FakeGraph,
        "device": nullcontext, "graph_pool_handle": object,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return used


def test_all_captures_are_on_one_stream_and_in_one_pool(cuda: list[tuple[Any, dict[str, Any]]]) -> None:
    """cuBLAS keeps a workspace, 32 MiB on Hopper, for each stream that it was called on, to be run or recorded; and
    graphs with pools of their own would each keep what a step takes. When all have gone, so has their pool.

    What the event loop's thread does meanwhile is no part of them, and no reason to fail.
    """
    accelerator = CudaAccelerator(torch.device("cuda:0"))
    ran: list[int] = []
    kept = [accelerator.capture(lambda number=number: ran.append(number)) for number in range(3)]  # type: ignore[misc]
    assert ran == [0, 0, 1, 1, 2, 2]
    assert len(cuda) == 6
    assert len({id(stream) for stream, _ in cuda}) == 1
    asked = [asked for _, asked in cuda[1::2]]
    assert [each["capture_error_mode"] for each in asked] == ["thread_local"] * 3
    assert asked[0]["pool"] is not None
    assert len({id(each["pool"]) for each in asked}) == 1
    graphs = [launch.__self__ for launch in kept]  # type: ignore[attr-defined]
    accelerator.free_graphs()
    assert all(graph.freed for graph in graphs)
    kept.clear()
    graphs.clear()
    accelerator.capture(lambda: None)
    assert cuda[-1][1]["pool"] is not asked[0]["pool"]


def test_what_is_made_aside_has_a_stream_of_its_own_and_no_memory_is_given_back_in_a_capture(
    cuda: list[tuple[Any, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose end the mark is of. torch does not take it that the allocator's memory is given back in a capture."""
    events: list[int] = []

    class FakeEvent:
        def record(self) -> None:
            events.append(len(cuda))

    given_back: list[int] = []
    for name, fake in (
        ("Event", FakeEvent), ("empty_cache", lambda: given_back.append(1)), ("mem_get_info", lambda _: (7, 9))
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    accelerator = CudaAccelerator(torch.device("cuda:0"))
    accelerator.copy(lambda: None)
    made, _ = accelerator.aside(lambda: len(cuda))
    assert (made, events) == (2, [1, 2])
    asking = threading.Thread(target=accelerator.free_bytes)

    def captured() -> None:
        if not asking.ident:
            asking.start()
            asking.join(0.05)  # time for it to do what it must not
        assert not given_back

    accelerator.capture(captured)
    asking.join()
    assert given_back == [1]
    assert accelerator.free_bytes() == 7
    assert len({id(stream) for stream, _ in cuda}) == 3, "of copies, of what is made aside, of captures"


@dataclass
class Crossings:
    """pinned: of each `torch.empty` whether it was asked for so. copies: target, source, whether nobody waits.

    moved: of each `Tensor.to` whether what it was called on is pinned, and how it was called.
    """

    pinned: list[bool] = field(default_factory=list)
    copies: list[tuple[torch.Tensor, torch.Tensor, bool]] = field(default_factory=list)
    moved: list[tuple[bool, Any, dict[str, Any]]] = field(default_factory=list)


@pytest.fixture
def crossings(monkeypatch: pytest.MonkeyPatch) -> Crossings:
    """Record what torch is asked for, and do without a GPU."""
    found, in_pinned = Crossings(), list[torch.Tensor]()
    empty, copy = torch.empty, torch.Tensor.copy_

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        in_pinned.append(tensor.clone())
        return in_pinned[-1]

    def to(tensor: torch.Tensor, device: Any, **how: Any) -> torch.Tensor:
        found.moved.append((any(each is tensor for each in in_pinned), device, how))
        return tensor

    def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        found.copies.append((target, source, non_blocking))
        return target if source.is_meta else copy(target, source)

    def made(*size: Any, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        found.pinned.append(pin_memory)
        return empty(*size, **how)

    for owner, name, fake in (
        (torch, "empty", made), (torch.Tensor, "pin_memory", pin_memory), (torch.Tensor, "to", to),
        (torch.Tensor, "copy_", copied),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, fake)
    return found


class FakeCuda(CudaAccelerator):
    """Its memory is the host's."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda:0"))
        self.device = torch.device("cpu")

    def mark(self) -> Any:
        return None


@pytest.mark.usefixtures("cuda")
def test_numbers_of_a_step_are_pinned_and_nobody_waits_for_them(crossings: Crossings) -> None:
    """From memory that is not pinned a copy waits for the device, whatever it is asked for."""
    device = torch.device("cuda:0")
    CudaAccelerator(device).moved(torch.ones(2))
    hopper = next(each for each in DEVICES if each.capability.version == (9, 0))
    GpuOps(DeviceContext(device, policy_of(9, 0), hopper))._moved(torch.ones(2))
    assert crossings.moved == [(True, device, {"non_blocking": True})] * 2
    packed = PackedTransfer(FakeCuda(), 3, {"token": torch.int64})
    assert crossings.pinned == [True] * NUM_SLOTS
    turn = packed.turn()
    packed.send(turn)
    packed.fetch(turn)
    logits = torch.zeros(3, device="meta")
    crossings.pinned.clear()
    copy_to_host(logits)
    assert crossings.pinned == [True]
    assert [nobody_waits for _, _, nobody_waits in crossings.copies] == [True] * 3


@pytest.mark.usefixtures("cuda")
def test_nobody_waits_for_blocks_that_move(crossings: Crossings) -> None:
    accelerator = FakeCuda()
    part, slab = torch.arange(12, dtype=torch.int32).view(4, 3), accelerator.staging(24).view(2, 12)
    assert crossings.pinned == [True]
    moves = StagedBlockCopy(accelerator, 2, [part], [slab])
    before = part.clone()
    moves.out([(3, 0), (1, 1)])
    moves.back([(0, 0), (2, 1)])
    assert part.tolist() == before[[3, 1, 1, 3]].tolist()
    host = slab.untyped_storage().data_ptr()
    crossed = [each for *ends, each in crossings.copies if host in {end.untyped_storage().data_ptr() for end in ends}]
    assert crossed == [True] * 4
