"""Kernels that several capabilities want are compiled once: only where it is known to be the same for each."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache

import pytest

from motley.kernels.compiler import compile_pool, ptx_families
from motley.kernels.compiler.aot import CompiledKernel
from motley.kernels.compiler.compile_pool import CompileFailure, CompileJob
from motley.kernels.compiler.ptx_families import PTX_FAMILIES, ptx_family
from motley.kernels.device.compute_capability import CAPABILITIES
from motley.kernels.launch.kernel_operation import ProblemShape
from motley.kernels.launch.variant import Variant
from motley.kernels.registry import OPERATIONS, find_operation
from motley.kernels.tuning.compile_matrix import select_jobs

SHAPE = ProblemShape.of(n=896, t=1)
CONFIG = find_operation("rms_norm").configs(compile_pool.policy_of(8, 6), SHAPE)[0]
PTX = ".version 8.4\n.target sm_{}{}\n.address_size 64\n{}"


def job(capability: tuple[int, int]) -> CompileJob:
    return CompileJob("rms_norm", capability, SHAPE, CONFIG)


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A compiler and an assembler that only say what was asked of them; the PTX for 8.9 is 8.6's, for 7.0 not 6.0's."""
    told: list[str] = []

    def compile_variant(variant: Variant, capability: tuple[int, int]) -> CompiledKernel:
        told.append("compiled {}.{}".format(*capability))
        number = 10 * capability[0] + capability[1]
        ptx = PTX.format(number, "a" if number >= 90 else "", "odd" if capability == (7, 0) else "even")
        return CompiledKernel(variant.name, capability, 32, 0, 0, 128, 0.1, ptx)

    def assembled(compiled: CompiledKernel, variant: Variant, capability: tuple[int, int]) -> CompiledKernel:
        told.append("assembled {}.{}".format(*capability))
        return replace(compiled, capability=capability, registers=40)

    monkeypatch.setattr(compile_pool, "compile_variant", compile_variant)
    monkeypatch.setattr(compile_pool, "assemble_ptx", assembled)
    return told


def test_a_family_is_compiled_once_and_assembled_for_each(tools: list[str]) -> None:
    found = compile_pool._compile(job((8, 6)), 0, [(8, 9)], ())
    assert tools == ["compiled 8.6", "assembled 8.9"]
    assert {capability: each.registers for capability, each in found.items() if isinstance(each, CompiledKernel)} == {
        (8, 6): 32, (8, 9): 40,
    }  # fmt: skip


def test_that_it_is_one_is_proven_and_a_difference_is_a_failure(tools: list[str]) -> None:
    found = compile_pool._compile(job((8, 6)), 0, [(8, 9)], [(8, 9)])
    assert "compiled 8.9" in tools
    assert not any(isinstance(each, CompileFailure) for each in found.values())
    found = compile_pool._compile(job((6, 0)), 0, [(6, 1), (7, 0)], [(6, 1), (7, 0)])
    assert isinstance(found[6, 1], CompiledKernel)
    assert found[7, 0] == CompileFailure("its PTX is not that of (6, 0): they are no family")


def test_every_member_is_compared_once_with_those_it_is_assembled_with() -> None:
    proof = compile_pool._SamePtxProof()
    assert proof.order([(6, 0)]) == ((6, 0), (), frozenset())  # alone: nothing is claimed, and nothing learnt
    assert proof.order([(6, 1), (7, 0)]) == ((6, 1), ((7, 0),), {(7, 0)})
    assert proof.order([(6, 1), (7, 0)]) == ((6, 1), ((7, 0),), frozenset())
    assert proof.order([(6, 0), (7, 0), (7, 5)]) == ((7, 0), ((6, 0), (7, 5)), {(6, 0), (7, 5)})
    assert proof.order([(7, 5), (6, 1)]) == ((7, 5), ((6, 1),), frozenset())


def test_what_is_known_of_two_members_says_nothing_of_two_others() -> None:
    proof = compile_pool._SamePtxProof()
    proof.order([(6, 0), (6, 1)])
    for _ in range(2):
        assert proof.order([(7, 0), (7, 5)]) == ((7, 0), ((7, 5),), {(7, 5)})


def test_where_the_source_lay_makes_no_other_ptx() -> None:
    def found(target: str, folder: str, instruction: str) -> CompiledKernel:
        ptx = (
            f".target {target}\n\t.loc 1 7 0 // {folder}/norm.py:7\n\t{instruction} %r1, %r2;\n"
            f'\t.file 1 "{folder}/norm.py"\n\t.section\t.debug_str {{ // {folder} }}\n'
        )
        return CompiledKernel("k", (8, 6), 32, 0, 0, 128, 0.1, ptx)

    one = found("sm_86", "/here", "add.f32")
    assert one.same_ptx(found("sm_89", "/there", "add.f32"))
    assert not one.same_ptx(found("sm_89", "/here", "mul.f32"))


@pytest.mark.slow("Works out what every operator launches on every capability")
def test_families_have_known_members_and_name_known_kernels() -> None:
    kernels = {name for each in CAPABILITIES for name in launched(each)}
    for release in (None, (3, 7)):
        members = [each for known in PTX_FAMILIES if known.triton == release for each in known.members]
        assert len(set(members)) == len(members)
        assert set(members) <= set(CAPABILITIES)
    for each in PTX_FAMILIES:
        first, *others = each.members
        assert first not in each.apart
        assert each.apart.keys() <= set(others)
        for pattern in (pattern for apart in each.apart.values() for pattern in apart):
            assert any(fnmatchcase(name, pattern) for name in kernels), pattern


@pytest.mark.parametrize(
    ("installed", "named"),
    [
        ((3, 7), {(7, 0): (6, 0), (7, 5): (6, 0), (8, 6): (8, 0), (8, 9): (8, 0), (9, 0): (9, 0), (12, 0): (10, 0)}),
        ((3, 9), {(7, 0): (6, 0), (7, 5): (7, 5), (8, 0): (8, 0), (8, 6): (8, 6), (8, 9): (8, 6), (12, 0): (12, 0)}),
    ],
)
def test_a_family_is_of_the_triton_that_it_was_found_by(
    monkeypatch: pytest.MonkeyPatch,
    installed: tuple[int, int],
    named: dict[tuple[int, int], tuple[int, int]],
) -> None:
    monkeypatch.setattr(ptx_families, "installed_triton", lambda: installed)
    assert {each: ptx_family("w4a16_gemv", each) for each in named} == named
    assert ptx_family("attention_decode_heads", (7, 5)) == (7, 5)
    assert ptx_family("sample_tally_3", (10, 3)) == (10, 3)


@cache
def launched(capability: tuple[int, int]) -> frozenset[str]:
    jobs = [job for each in OPERATIONS for job in select_jobs(each, capability, quick=True)]
    return frozenset(launch.variant.name for job in jobs for launch in job.launches())


@pytest.mark.parametrize("capability", CAPABILITIES, ids="{0[0]}.{0[1]}".format)
def test_products_are_of_one_instruction_in_a_family(capability: tuple[int, int]) -> None:
    for kernel in launched(capability):
        first = ptx_family(kernel, capability)
        if kernel in ("w4a16_gemm", "attention_prefill", "w8a8_tensor", "fp8"):
            assert CAPABILITIES[first].instruction == CAPABILITIES[capability].instruction, kernel
