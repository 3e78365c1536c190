"""Static tables are held to the kernels as they are: a change of a kernel fails until they are made anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import triton

from motley.kernels.compiler.aot import CompiledKernel
from motley.kernels.compiler.compile_pool import CompileFailure, CompileJob
from motley.kernels.device.precision import policy_of
from motley.kernels.launch.config_tables import ConfigEntry, ConfigTable, write_table
from motley.kernels.launch.kernel_operation import KernelLaunch, ProblemShape
from motley.kernels.launch.variant import Config
from motley.kernels.registry import find_operation
from motley.kernels.tuning import compile_matrix, table_staleness
from motley.kernels.tuning.compile_matrix import MatrixRow
from motley.kernels.tuning.static_prediction import (
    ConfigCandidate,
    predict_seconds,
    reference_device,
    static_facts,
)

GEMV, P40 = find_operation("w4a16_gemv"), policy_of(6, 1)
SHAPE = ProblemShape.of(group=128, k=4096, m=1, n=4096)
CONFIG = GEMV.configs(P40, SHAPE)[0]
LOOP = "$L1:\n\tfma.rn.f32 %r1, %r2;\n\t@%p1 bra $L1;\n"
MADE = CompiledKernel("k", (6, 1), 40, 0, 64, 128, 0.0, LOOP)
Table_ = Callable[..., None]


def candidate() -> ConfigCandidate:
    return ConfigCandidate(CONFIG, tuple((launch, MADE) for launch in GEMV.launches(P40, SHAPE, CONFIG)))


@pytest.fixture
def table(folder: Path) -> Table_:
    """Writes 6.1's, of one entry: what is compiled here, but for the facts that are given."""

    def written(config: Config = CONFIG, version: str = triton.__version__, **others: object) -> None:
        made = static_facts(candidate(), predict_seconds(reference_device(P40), P40, GEMV, SHAPE, candidate()))
        entries = {SHAPE: ConfigEntry(config, {**made, **others})}
        write_table(ConfigTable(GEMV.name, "static", {"triton": version}, entries), folder / "sm61")

    return written


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_all(
        jobs: Sequence[CompileJob], *_: object
    ) -> dict[CompileJob, tuple[tuple[KernelLaunch, CompiledKernel], ...]]:
        return {job: tuple((launch, MADE) for launch in job.launches()) for job in jobs}

    monkeypatch.setattr(compile_matrix, "compile_all", compile_all)


def faults(*, quick: bool = False) -> list[MatrixRow]:
    rows, _ = compile_matrix.run_matrix([GEMV], [(6, 1)], quick=quick)
    return [row for row in rows if row.fault]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("others", [{"registers": 48}, {"shared": 0}, {"predicted_us": 1.0}], ids=str)
def test_the_matrix_fails_where_a_table_says_what_is_not_so(table: Table_, others: dict[str, object]) -> None:
    table()
    assert not faults()
    table(**others)
    [fault] = faults()
    assert fault.config == candidate().main[0].variant.config.to_json()
    [(name, value)] = others.items()
    assert "tuned/sm61/w4a16_gemv.json has {'registers': " in fault.fault
    assert f"'{name}': {value}" in fault.fault
    assert SHAPE.key in fault.fault


@pytest.mark.usefixtures("compiler")
def test_a_table_of_another_triton_is_not_compared(table: Table_) -> None:
    table(version="3.0.0", registers=48)
    assert not faults()


@pytest.mark.usefixtures("compiler")
def test_every_entry_is_compiled_to_be_compared(table: Table_, folder: Path) -> None:
    """Also of a shape that is none of the operator's own, which launches come to as the nearest."""
    own = ProblemShape.of(group=32, k=8192, m=4, n=8192)
    assert own not in {job.shape for job in compile_matrix.select_jobs(GEMV, (6, 1))}
    write_table(
        ConfigTable(GEMV.name, "static", {"triton": triton.__version__}, {own: ConfigEntry(CONFIG, {})}),
        folder / "sm61",
    )
    assert CompileJob(GEMV.name, (6, 1), own, CONFIG) in compile_matrix.select_jobs(GEMV, (6, 1))
    assert [own.key in fault.fault for fault in faults()] == [True]


def test_what_did_not_compile_or_is_not_the_tables_has_nothing_to_compare(table: Table_) -> None:
    table(registers=48)
    job = CompileJob(GEMV.name, (6, 1), SHAPE, CONFIG)
    results = tuple((launch, MADE) for launch in job.launches())
    assert table_staleness.describe_staleness(job, results)
    assert not table_staleness.describe_staleness(job, [(launch, CompileFailure("no")) for launch, _ in results])
    assert not table_staleness.describe_staleness(replace(job, config=GEMV.configs(P40, SHAPE)[1]), results)
    assert not table_staleness.describe_staleness(replace(job, capability=(7, 0)), results)
