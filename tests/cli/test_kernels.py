"""`motley kernels …`, `motley bench kernels` and `motley bench gpu`, without a GPU."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from motley.cli.app import run
from motley.kernels.launch import config_tables
from motley.kernels.launch.model_shapes import REHEARSAL
from motley.kernels.registry import OPERATIONS
from motley.kernels.tuning import compile_matrix, matrix_page
from motley.kernels.tuning.source_text import code_alone
from motley_bench.kernels import kernel_cases
from motley_bench.kernels import kernel_rates as bench_kernels

CODE = functools.cache(code_alone)  # of each kernel's source once


def compiled(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the interpreter, which the tests use, and the compiler cannot share one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "motley", "kernels", *arguments]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert said.returncode == code, said.stderr
    return said


def test_compile_prints_what_each_kernel_uses(tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    options = ["--op", "w4a16_dequantize", "--json", "--table", str(table)]
    found = json.loads(compiled("compile", "--cc", "61", "9.0", *options).stdout)
    assert (found["source"], found["versions"].keys()) == ("static", {"motley", "triton"})
    assert {row["capability"] for row in found["rows"]} == {"6.1", "9.0"}
    for row in found["rows"]:
        assert (row["fault"], row["spilled"], row["threads"]) == ("", 0, 128)
        assert 16 <= row["registers"] <= 255
        assert 0 < row["occupancy"] <= 1
        assert row["shared"] <= row["shared_limit"] == {"6.1": 48, "9.0": 227}[row["capability"]] * 1024
        assert sum(count for name, count in row["instructions"].items() if "ld.global" in name) == row["mix"]["load"]
        assert sum(row["instructions"].values()) > sum(row["mix"].values())
    assert "| w4a16_dequantize | – |" in table.read_text(), "6.0 was not asked for"
    assert found["cached"] == sum(row["cached"] for row in found["rows"])
    assert found["cpu_seconds"] > 0


@pytest.mark.thorough
def test_each_kernel_is_told_and_what_takes_more_than_its_budget_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiles with nothing cached, then with all of it, and expects both to be reported, of each and of all."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    few = ["compile", "--cc", "90", "--quick", "--op", "silu_mul"]
    used = r"  \d+ registers, 0 B spilled, \d+ of \d+ B shared, \d+% occupancy, "
    cold, warm = compiled(*few, "--budget", "0.01", code=1), compiled(*few, "--budget", "600")
    assert re.search(
        r"compiling took \d+ s of two cores, \d+ s at the pace of its budget, and may take 0.01 s", cold.stderr
    )
    for said, took, counted in (
        (cold, r"\d+\.\d s", r"[1-9]\d* compiled anew and 0 from the cache in"),
        (warm, "from the cache", r"0 compiled anew and [1-9]\d* from the cache in"),
    ):
        *kernels, last = said.stdout.splitlines()
        assert kernels
        assert all(re.search(used + took, line) for line in kernels), kernels
        assert re.search(f", 0 at fault, {counted}", last)


def test_static_tables_say_so(tmp_path: Path) -> None:
    compiled("tune", "--static", "--cc", "7.5", "--op", "w4a16_dequantize", "--out", str(tmp_path))
    table = config_tables.ConfigTable.from_json(json.loads((tmp_path / "sm75" / "w4a16_dequantize.json").read_text()))
    assert table.source == "static"
    assert table.about["device"]
    assert all("predicted_us" in entry.facts and "microseconds" not in entry.facts for entry in table.entries.values())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["compile", "--cc", "5.2"], "--cc 5.2"),
        (["compile", "--all", "--quick", "--check", "page.md"], "--check: needs --all, and takes neither"),
        (["compile", "--cc", "90", "--check", "page.md"], "--check: needs --all, and takes neither"),
        (["compile", "--op", "nothing"], "there is no operator 'nothing'; there are w4a16_gemv"),
        (["tune", "--op", "w4a16_gemv"], "torch finds no GPU here; --static"),
    ],
)
def test_refusals(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert run(["kernels", *arguments]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("made_of", "table", "quick", "code", "told"),
    [
        ("these", "its", True, 0, "of these sources"),
        ("these", "edited", False, 1, "its table is not what was compiled"),
        ("others", "its", False, 0, "its table is right, but of other sources"),
        ("others", "another", False, 1, "its table is not what was compiled"),
        ("none", "none", False, 1, "its table is not what was compiled"),
    ],
)
def test_all_is_compiled_only_where_a_page_is_of_other_sources(
    made_of: str, table: str, quick: bool, code: int, told: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """And then it must have the table that comes of it. What is compiled is not the question here."""
    path, requested = tmp_path / "page.md", []
    rows = [compile_matrix.MatrixRow("op", "kernel", (6, 1), "m=1", {}, "", "", registers=40)]

    def run_matrix(
        *_: Any, quick: bool, **__: Any
    ) -> tuple[list[compile_matrix.MatrixRow], compile_matrix.CompileTime]:
        requested.append(quick)
        return rows, compile_matrix.CompileTime(1.0, 1.0)

    monkeypatch.setattr(compile_matrix, "run_matrix", run_matrix)
    monkeypatch.setattr(matrix_page, "code_alone", CODE)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    if table != "none":
        matrix_page.write_page(path, rows if table != "another" else [replace(rows[0], registers=41)], complete=True)
    if table == "edited":
        path.write_text(path.read_text().replace("40 regs", "39 regs"))
    if made_of == "others":
        path.write_text(re.sub("made of [0-9a-f]+", "made of " + "0" * 32, path.read_text()))
    assert run(["kernels", "compile", "--all", "--summary", "--check", str(path)]) == code
    assert requested == [quick]
    assert told in " ".join(capsys.readouterr().err.split())


def test_under_the_interpreter_nothing_is_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["kernels", "compile", "--cc", "61"]) == 2
    assert "TRITON_INTERPRET is set" in " ".join(capsys.readouterr().err.split())


def test_the_list_has_every_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["kernels", "list", "--cc", "6.1", "--cc", "9.0", "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert {row["op"] for row in rows} == {operation.name for operation in OPERATIONS}
    refused = {(row["capability"], row["op"]) for row in rows if row["refused"]}
    assert ("6.1", "w4a16_gemm") in refused
    assert ("9.0", "w4a16_gemm") not in refused


@pytest.mark.slow("Measures the memory's bandwidth, and times each layer beside its peers")
def test_operators_of_a_cpu_are_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On layers as small as they may be: packing those of a whole model takes longer than all that is told of them."""
    small = replace(REHEARSAL, name="qwen2.5-0.5b", hidden=256, intermediate=512)
    monkeypatch.setattr(bench_kernels, "MODELS", (small,))
    monkeypatch.setattr(kernel_cases, "_CPU_CACHE", 2**20)
    out = tmp_path / "kernels.json"
    command = ["bench", "kernels", "--model", "qwen2.5-0.5b", "--tokens", "1", "--op", "linear", "--json"]
    assert run([*command, "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text()) == report
    assert max(report["machine"]["memory_gb_per_s"].values()) > 0
    assert report["machine"]["ceiling"] in ("torch copy", "torch sum")
    assert {row["peer"] for row in report["rows"]} == {"torch.matmul bf16", "int4pack_mm"}
    assert {(row["workload"]["n"], row["workload"]["k"]) for row in report["rows"]} == set(small.linears.values())
    for row in report["rows"]:
        assert row["error_of_allowed"] <= 1
        assert row["ratio"] == pytest.approx(row["peer_value"] / row["value"])
        moved = row["workload"]["n"] * row["workload"]["k"] / 2
        assert row["gb_per_s"] * row["value"] * 1e3 > moved, "the weights at least"


def test_a_measurement_with_a_failure_is_written_and_has_not_passed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = {
        "rows": [], "skipped": [{"case": "large", "skipped": "needs 26 GiB"}],
        "failed": [{"case": "linear m=1", "error": "AssertionError: off by 3 times"}],
    }  # fmt: skip
    monkeypatch.setattr(bench_kernels, "run", lambda **_: report)
    out = tmp_path / "kernels.json"
    assert run(["bench", "kernels", "--quick", "--out", str(out)]) == 1
    assert json.loads(out.read_text()) == report
    told = " ".join(capsys.readouterr().err.split())
    assert "large: skipped: needs 26 GiB" in told
    assert "1 of the operators failed: linear m=1: AssertionError: off by 3 times" in told
    report["failed"] = []
    assert run(["bench", "kernels", "--quick"]) == 0


def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "gpu", "--out", str(tmp_path)]) == 1
    assert "torch finds no GPU here; --rehearse" in " ".join(capsys.readouterr().err.split())


def test_the_rehearsal_goes_through_as_it_is_documented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs the part that takes the least, with the processes that it starts itself and the time that it has."""
    assert run(["bench", "gpu", "--out", str(tmp_path), "--rehearse", "9.0", "--part", "engine"]) == 0
    told = capsys.readouterr()
    assert "engine: right" in told.out, told.err
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["rehearsal"], summary["limit"], summary["parts"]["engine"]["complete"]) == (True, 480.0, True)
