"""The maximum bandwidth of a device's memory, and the kernels that it is measured with."""

from __future__ import annotations

import pytest
import torch

from motley.kernels.tuning import memory_bandwidth as module
from motley.kernels.tuning import streaming_kernels
from motley.kernels.tuning.memory_bandwidth import MemoryBandwidth, measure_memory_bandwidth
from motley.kernels.tuning.timing import Timing

CPU = torch.device("cpu")


def test_the_ceiling_is_the_fastest_of_three_and_says_which() -> None:
    speed = MemoryBandwidth({"torch copy": 4.29e12, "Triton copy": 4.25e12, "Triton read": 4.312e12})
    assert (speed.bandwidth, speed.fastest) == (4.312e12, "Triton read")
    assert speed.describe() == "4312 GB/s (Triton read); torch copy 4290, Triton copy 4250"
    assert speed.to_json() == {
        "memory_gb_per_s": {"torch copy": 4290.0, "Triton copy": 4250.0, "Triton read": 4312.0},
        "ceiling": "Triton read",
    }


@pytest.mark.parametrize("measured", [{}, {"torch copy": 0.0}, {"torch copy": float("nan")}])
def test_what_was_not_measured_is_no_ceiling(measured: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="measured"):
        MemoryBandwidth(measured)


@pytest.mark.parametrize(
    ("triton", "names"),
    [(True, ["torch copy", "Triton copy", "Triton read"]), (False, ["torch copy", "torch sum"])],
)
def test_bytes_are_those_that_are_read_and_written(
    triton: bool, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of half the memory moves as much as a sum of it; each takes a millisecond, by this clock."""

    def timed(run: object, device: torch.device) -> Timing:
        assert callable(run)
        run()
        return Timing(1e-3, 1e-3, 1e-3)

    monkeypatch.setattr(module, "time_uncaptured", timed)
    found = measure_memory_bandwidth(CPU, 2**17 + 5, triton=triton)
    assert found.measured == dict.fromkeys(names, 2**17 / 1e-3)


@pytest.mark.parametrize(("free", "taken"), [(2**37, 2**33), (6 * 2**30, 3 * 2**30)])
def test_of_a_gpu_8_gib_are_moved_or_half_of_what_is_free(
    free: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2**38))
    assert module._default_bytes(torch.device("cuda:0")) == taken


def test_the_kernels_move_every_word() -> None:
    words = 3 * streaming_kernels.CHUNK_BYTES // 4
    source = torch.randint(-(2**31), 2**31, (words,), dtype=torch.int64).to(torch.int32)
    target = torch.zeros_like(source)
    streaming_kernels.stream_copy(source, target)
    assert torch.equal(source, target)
    small = source % 1000
    streaming_kernels.stream_read(small, sums := streaming_kernels.partial_sums(small))
    assert torch.equal(sums.long(), small.view(3, -1).long().sum(1))
