"""`bench gpu --part divided`: that it tells what is wrong. Its ways are rehearsed in test_bench_gpu.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from motley_bench.gpu import gpu_divided_part, gpu_divided_tasks


@pytest.mark.slow("Five comparisons, each with three more engines that load and answer")
def test_weights_that_are_not_those_asked_for_are_not_right(tmp_path: Path) -> None:
    """Before the update, or after it; and an update that changes nothing."""
    tasks = gpu_divided_tasks.DividedTasks(tmp_path, real=False)
    tasks.write()
    base, way = tmp_path / "bf16", gpu_divided_part.WAYS["layers on disk"]
    settled = tasks.said("layers on disk", "bf16", 2, 60.0)
    assert settled["right"]
    with tasks._divided(base / "new", way) as engine:
        assert not tasks._compared(engine, base / "old", way, 2)["right"]
    same = {name: tensor for name, tensor in load_file(base / "old" / "model.safetensors").items() if "norm" in name}
    save_file(same, base / "update.safetensors")
    stale = tasks.said("layers on disk", "bf16", 2, 60.0)
    assert stale["old"]["right"]
    assert not stale["new"]["right"]
    assert not stale["right"]
