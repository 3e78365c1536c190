import os
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest

from motley.kernels.device.compute_capability import CAPABILITIES, TORCH_BUILDS, UnsupportedCapability, capability_of

KIB = 1024
PROMISED = ["6.0", "6.1", "7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0"]


def test_every_capability_is_there():
    assert [str(chip) for chip in CAPABILITIES.values()] == PROMISED
    assert all(version == chip.version for version, chip in CAPABILITIES.items())


@pytest.mark.parametrize("chip", CAPABILITIES.values(), ids=str)
class TestEach:
    def test_figures_have_sources(self, chip):
        figures = {field.name for field in fields(chip)} | {"torch_builds"}
        assert chip.sources.keys() == figures
        assert all(len(source) > 10 for source in chip.sources.values())

    def test_sizes_fit_each_other(self, chip):
        assert chip.registers_per_sm == 65536
        assert chip.shared_default <= chip.shared_optin
        assert chip.shared_optin + chip.shared_reserved <= chip.shared_per_sm <= 228 * KIB
        assert chip.threads_per_block <= chip.threads_per_sm
        assert chip.threads_per_sm % (chip.warp * chip.schedulers) == 0
        assert chip.warps_per_sm >= chip.blocks_per_sm
        assert chip.registers_per_sm % (chip.schedulers * chip.register_granularity) == 0

    def test_one_block_of_most_shared_memory_fills_an_sm_from_8_0(self, chip):
        """The Programming Guide: a block gets all but 1 KiB of an SM's shared memory."""
        if chip.major >= 8:
            assert chip.shared_optin + KIB == chip.shared_per_sm

    def test_units_come_with_their_architecture(self, chip):
        assert bool(chip.tensor_fma) == (chip.version >= (7, 0))
        assert chip.int8_unit == ("none" if chip.version == (6, 0) else "dp4a" if chip.version < (7, 5) else "tensor")
        assert chip.bf16 == (chip.version >= (8, 0))
        assert chip.fp8 == (chip.version >= (8, 9))
        assert (chip.instruction == "fma.rn.f32") == (chip.version < (8, 0))

    def test_torch_can_run_on_it(self, chip):
        builds = chip.torch_builds
        assert builds
        assert (builds == ("cu126",)) == (chip.version < (7, 5))
        assert ("cu126" in builds) == (chip.version < (9, 0))


def test_half_precision_on_pascal():
    """Programming Guide: 128 results a clock against 64 on 6.0, 2 against 128 on 6.1."""
    assert CAPABILITIES[6, 0].fp16_fma == 2 * CAPABILITIES[6, 0].fp32_fma
    assert 64 * CAPABILITIES[6, 1].fp16_fma == CAPABILITIES[6, 1].fp32_fma


def test_code_runs_on_a_higher_minor_of_its_major_only():
    assert (8, 9) not in TORCH_BUILDS["cu130"]  # 8.6 runs there
    assert "cu130" in CAPABILITIES[8, 9].torch_builds
    assert (6, 1) not in TORCH_BUILDS["cu126"]
    assert "cu126" in CAPABILITIES[6, 1].torch_builds
    assert "cu126" not in CAPABILITIES[12, 0].torch_builds


@pytest.mark.parametrize(
    ("unknown", "taken"), [((12, 1), "12.0"), ((11, 0), "10.3"), ((8, 7), "8.6"), ((13, 0), "12.0")]
)
def test_a_newer_one_is_taken_as_the_next_lower(unknown, taken):
    chip, note = capability_of(*unknown)
    assert str(chip) == taken
    assert f"{unknown[0]}.{unknown[1]}" in note
    assert taken in note


def test_a_known_one_has_no_note():
    assert capability_of(8, 9) == (CAPABILITIES[8, 9], "")


@pytest.mark.parametrize("old", [(5, 2), (3, 5), (5, 9)])
def test_an_older_one_is_refused_by_name(old):
    with pytest.raises(UnsupportedCapability, match=rf"{old[0]}\.{old[1]} has no kernels; expected one of 6\.0, 6\.1"):
        capability_of(*old)
    assert issubclass(UnsupportedCapability, ValueError)


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton, which compiles for any GPU without one")
def test_what_triton_makes_of_a_dot(tmp_path):
    """From instruction_rows the capability's own instruction; with half as many mma.sync."""
    expected = {}
    for chip in CAPABILITIES.values():
        expected[f"{chip.major}{chip.minor}:{max(16, chip.instruction_rows)}"] = chip.instruction
        if chip.instruction_rows > 16:
            expected[f"{chip.major}{chip.minor}:{chip.instruction_rows // 2}"] = "mma.sync"
    script = Path(__file__).parents[1] / "support" / "dot_instructions.py"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, str(script), *expected],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert dict(line.split(" ", 1) for line in ran.stdout.splitlines()) == expected
