"""Whether torch has code for a device: asked before anything is loaded on it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from motley.kernels import rig
from motley.kernels.torch_code import has_code, wheel_for


@pytest.mark.parametrize(
    ("capability", "archs", "fits"),
    [
        ((6, 1), ["sm_60"], True),
        ((6, 0), ["sm_61"], False),
        ((7, 0), ["sm_60", "sm_75"], False),
        ((8, 9), ["sm_80", "sm_86"], True),
        ((9, 0), ["sm_90a"], True),
        ((12, 0), ["sm_100", "sm_100a", "sm_90"], False),
        ((12, 0), ["compute_90"], True),
        ((8, 0), ["compute_90"], False),
        ((10, 3), ["sm_100f"], True),
        ((10, 3), ["compute_100f"], True),
        ((12, 0), ["sm_100f", "compute_100f", "compute_90a"], False),
        ((6, 1), [], False),
    ],
)
def test_whether_torch_has_code_for_a_capability(capability: tuple[int, int], archs: list[str], fits: bool) -> None:
    assert has_code(capability, archs) is fits


def test_a_device_that_torch_has_no_code_for_is_refused_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever makes the operators: weights would be loaded before CUDA says that it finds no kernel image."""
    p40 = SimpleNamespace(name="Tesla P40", major=6, minor=1, total_memory=24 * 2**30, multi_processor_count=30)
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: p40)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    device = torch.device("cuda", 0)
    with pytest.raises(ValueError, match=r"Tesla P40 .*6\.1.*no machine code .*sm_75, sm_90.*\+cu126") as refused:
        rig.gpu(device)
    assert wheel_for((6, 1)) in str(refused.value)
    assert not used
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_50", "sm_60"])
    assert rig.gpu(device).about.name == "Tesla P40"
    assert used == [device]
