"""What several capabilities want is compiled once: only where it is known to be the same for each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from motley.kernels import compiling
from motley.kernels.aot import FAMILIES, Compiled, family_of
from motley.kernels.capability import CAPABILITIES
from motley.kernels.compiling import Failed, Job
from motley.kernels.operation import Shape
from motley.kernels.registry import operation
from motley.kernels.variant import Variant

SHAPE = Shape.of(n=896, t=1)
CONFIG = operation("rms_norm").configs(compiling.policy_of(8, 6), SHAPE)[0]
PTX = ".version 8.4\n.target sm_{}{}\n.address_size 64\n{}"


def job(capability: tuple[int, int]) -> Job:
    return Job("rms_norm", capability, SHAPE, CONFIG)


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A compiler and an assembler that only say what was asked of them; the PTX for 8.9 is 8.6's, for 7.0 not 6.0's."""
    told: list[str] = []

    def compile_variant(variant: Variant, capability: tuple[int, int]) -> Compiled:
        told.append("compiled {}.{}".format(*capability))
        number = 10 * capability[0] + capability[1]
        ptx = PTX.format(number, "a" if number >= 90 else "", "odd" if capability == (7, 0) else "even")
        return Compiled(variant.name, capability, 32, 0, 0, 128, 0.1, ptx)

    def assembled(compiled: Compiled, variant: Variant, capability: tuple[int, int]) -> Compiled:
        told.append("assembled {}.{}".format(*capability))
        return replace(compiled, capability=capability, registers=40)

    monkeypatch.setattr(compiling, "compile_variant", compile_variant)
    monkeypatch.setattr(compiling, "assembled", assembled)
    return told


def test_a_family_is_compiled_once_and_assembled_for_each(tools: list[str]) -> None:
    found = compiling._compile(job((8, 6)), 0, [job((8, 9))], prove=False)
    assert tools == ["compiled 8.6", "assembled 8.9"]
    assert {capability: each.registers for capability, each in found.items() if isinstance(each, Compiled)} == {
        (8, 6): 32, (8, 9): 40,
    }  # fmt: skip


def test_that_it_is_one_is_proven_and_a_difference_is_a_failure(tools: list[str]) -> None:
    found = compiling._compile(job((8, 6)), 0, [job((8, 9))], prove=True)
    assert "compiled 8.9" in tools
    assert not any(isinstance(each, Failed) for each in found.values())
    found = compiling._compile(job((6, 0)), 0, [job((6, 1)), job((7, 0))], prove=True)
    assert isinstance(found[6, 1], Compiled)
    assert found[7, 0] == Failed("its PTX is not that of (6, 0): they are no family")


def test_where_the_source_lay_makes_no_other_ptx() -> None:
    def found(target: str, folder: str, instruction: str) -> Compiled:
        ptx = (
            f".target {target}\n\t.loc 1 7 0 // {folder}/norm.py:7\n\t{instruction} %r1, %r2;\n"
            f'\t.file 1 "{folder}/norm.py"\n\t.section\t.debug_str {{ // {folder} }}\n'
        )
        return Compiled("k", (8, 6), 32, 0, 0, 128, 0.1, ptx)

    one = found("sm_86", "/here", "add.f32")
    assert one.same_ptx(found("sm_89", "/there", "add.f32"))
    assert not one.same_ptx(found("sm_89", "/here", "mul.f32"))


def test_families_have_known_members_of_one_kind() -> None:
    members = [each for family in FAMILIES for each in family]
    assert len(set(members)) == len(members)
    for family in FAMILIES:
        assert {family_of(each) for each in family} == {family[0]}
        assert len({CAPABILITIES[each].instruction for each in family}) == 1
    assert {family_of(each) for each in CAPABILITIES if each not in members} == set(CAPABILITIES) - set(members)
