"""Static tables are held to the kernels as they are: a change of a kernel fails until they are made anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import triton

from motley.kernels import matrix, stale
from motley.kernels.aot import Compiled
from motley.kernels.compiling import Failed, Job
from motley.kernels.matrix import Row
from motley.kernels.operation import Launch, Shape
from motley.kernels.precision import policy_of
from motley.kernels.registry import operation
from motley.kernels.static import Candidate, device_of, facts, predict
from motley.kernels.tuning import Entry, Table, write
from motley.kernels.variant import Config

GEMV, P40 = operation("w4a16_gemv"), policy_of(6, 1)
SHAPE = Shape.of(group=128, k=4096, m=1, n=4096)
CONFIG = GEMV.configs(P40, SHAPE)[0]
LOOP = "$L1:\n\tfma.rn.f32 %r1, %r2;\n\t@%p1 bra $L1;\n"
MADE = Compiled("k", (6, 1), 40, 0, 64, 128, 0.0, LOOP)
Table_ = Callable[..., None]


def candidate() -> Candidate:
    return Candidate(CONFIG, tuple((launch, MADE) for launch in GEMV.launches(P40, SHAPE, CONFIG)))


@pytest.fixture
def table(folder: Path) -> Table_:
    """Writes 6.1's, of one entry: what is compiled here, but for the facts that are given."""

    def written(config: Config = CONFIG, version: str = triton.__version__, **others: object) -> None:
        made = facts(candidate(), predict(device_of(P40), P40, GEMV, SHAPE, candidate()))
        entries = {SHAPE: Entry(config, {**made, **others})}
        write(Table(GEMV.name, "static", {"triton": version}, entries), folder / "sm61")

    return written


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_all(jobs: Sequence[Job], *_: object) -> dict[Job, tuple[tuple[Launch, Compiled], ...]]:
        return {job: tuple((launch, MADE) for launch in job.launches()) for job in jobs}

    monkeypatch.setattr(matrix, "compile_all", compile_all)


def faults(*, quick: bool = False) -> list[Row]:
    rows, _ = matrix.run([GEMV], [(6, 1)], quick=quick)
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
    own = Shape.of(group=32, k=8192, m=4, n=8192)
    assert own not in {job.shape for job in matrix.picks(GEMV, (6, 1))}
    write(Table(GEMV.name, "static", {"triton": triton.__version__}, {own: Entry(CONFIG, {})}), folder / "sm61")
    assert Job(GEMV.name, (6, 1), own, CONFIG) in matrix.picks(GEMV, (6, 1))
    assert [own.key in fault.fault for fault in faults()] == [True]


def test_what_did_not_compile_or_is_not_the_tables_has_nothing_to_compare(table: Table_) -> None:
    table(registers=48)
    job = Job(GEMV.name, (6, 1), SHAPE, CONFIG)
    results = tuple((launch, MADE) for launch in job.launches())
    assert stale.stale(job, results)
    assert not stale.stale(job, [(launch, Failed("no")) for launch, _ in results])
    assert not stale.stale(replace(job, config=GEMV.configs(P40, SHAPE)[1]), results)
    assert not stale.stale(replace(job, capability=(7, 0)), results)
