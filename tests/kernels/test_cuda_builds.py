"""The CUDA builds of torch and their Triton: one table in pyproject.toml, and what must agree with it."""

from __future__ import annotations

import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from motley.kernels.device.compute_capability import CAPABILITIES, TORCH_BUILDS, TORCH_RELEASES, Capability
from motley.kernels.launch import config_tables

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILDS: dict[str, dict[str, str]] = PROJECT["tool"]["motley"]["cuda-builds"]


def pins(name: str) -> Requirement:
    return next(each for each in map(Requirement, PROJECT["project"]["dependencies"]) if each.name == name)


@pytest.mark.parametrize("chip", CAPABILITIES.values(), ids=str)
def test_every_capability_has_a_build(chip: Capability) -> None:
    assert set(chip.torch_builds) & BUILDS.keys()


@pytest.mark.parametrize("build", BUILDS)
def test_a_build_has_what_this_project_takes(build: str) -> None:
    assert build in TORCH_BUILDS
    assert pins("torch").specifier.contains(BUILDS[build]["torch"])
    assert pins("triton").specifier.contains(BUILDS[build]["triton"])


def test_whatever_torch_is_taken_has_a_build_for_every_capability() -> None:
    """No release beyond the last with cu126, which alone has Pascal and Volta, and none before the first."""
    first, end = TORCH_RELEASES["cu126"]
    assert end is not None
    taken = pins("torch").specifier
    assert not taken.contains("{}.{}.0".format(*end))
    assert not taken.contains(f"{end[0]}.{end[1] + 1}.0")
    assert not taken.contains(f"{end[0] + 1}.0.0")
    assert not taken.contains(f"{first[0]}.{first[1] - 1}.1")
    assert all(taken.contains(each["torch"]) for each in BUILDS.values())


def test_the_matrix_is_compiled_by_the_tritons_of_the_builds() -> None:
    said = subprocess.run(["make", "-nB", "kernels"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    versions = " ".join(sorted({each["triton"] for each in BUILDS.values()}))
    assert f"for version in {versions};" in said.stdout
    assert all(
        f"triton=={version}" in said.stdout or f".triton-{version}" in said.stdout for version in versions.split()
    )


TABLES = sorted(config_tables.TUNED_FOLDER.glob("*/*.json"))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_static_tables_are_by_a_triton_that_the_matrix_compares_them_with(path: Path) -> None:
    table = config_tables.read_table_file(path)
    assert table is not None
    assert table.source == "measured" or table.about["triton"] in {each["triton"] for each in BUILDS.values()}


def test_torch_pins_that_triton() -> None:
    """Where a CUDA build of that torch is installed, its metadata say so; builds for CPUs pin none."""
    pinned = [each for each in map(Requirement, metadata.requires("torch") or ()) if each.name == "triton"]
    versions = {each["triton"] for each in BUILDS.values() if metadata.version("torch").startswith(each["torch"])}
    if not pinned or not versions:
        pytest.skip("this torch is a build for CPUs, or of another release")
    assert versions == {spec.version for each in pinned for spec in each.specifier}
