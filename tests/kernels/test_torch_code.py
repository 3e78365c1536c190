"""Whether torch has code for a device: asked before anything is loaded on it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from motley.kernels.device import device_context, torch_builds
from motley.kernels.device.compute_capability import TORCH_BUILDS, TORCH_RELEASES
from motley.kernels.device.torch_builds import has_machine_code, wheel_hint


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
    assert has_machine_code(capability, archs) is fits


@pytest.mark.parametrize(
    ("installed", "capability", "build"),
    [
        ("2.8.0", (12, 0), "cu128"), ("2.8.0+cpu", (9, 0), "cu128"), ("2.8.0", (6, 1), "cu126"),
        ("2.9.1+cu128", (12, 0), "cu130"), ("2.11.0", (7, 5), "cu130"), ("2.13.0", (12, 0), "cu130"),
        ("2.14.0", (7, 0), "cu126"), ("2.13.0a0+git1234", (8, 6), "cu130"),
    ],
)  # fmt: skip
def test_the_wheel_is_one_that_the_release_has(
    installed: str, capability: tuple[int, int], build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cu130 begins with 2.9, and cu128 ends with 2.11."""
    monkeypatch.setattr(torch_builds.metadata, "version", lambda name: installed)
    index = f"--index-url https://download.pytorch.org/whl/{build}"
    assert wheel_hint(capability) == f"pip install torch=={installed.partition('+')[0]}+{build} {index}"


def test_of_a_release_that_has_no_wheel_for_the_card_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_builds.metadata, "version", lambda name: "2.15.0")
    assert wheel_hint((7, 0)) == "pip install 'torch>=2.6,<2.15' --index-url https://download.pytorch.org/whl/cu126"
    assert TORCH_RELEASES.keys() == TORCH_BUILDS.keys()


def test_a_device_that_torch_has_no_code_for_is_refused_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever makes the operators: weights would be loaded before CUDA says that it finds no kernel image."""
    p40 = SimpleNamespace(name="Tesla P40", major=6, minor=1, total_memory=24 * 2**30, multi_processor_count=30)
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: p40)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    device = torch.device("cuda", 0)
    with pytest.raises(ValueError, match=r"Tesla P40 .*6\.1.*no machine code .*sm_75, sm_90.*\+cu126") as refused:
        device_context.gpu_context(device)
    assert wheel_hint((6, 1)) in str(refused.value)
    assert not used
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_50", "sm_60"])
    assert device_context.gpu_context(device).about.name == "Tesla P40"
    assert used == [device]
