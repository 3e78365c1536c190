"""`motley fit`, on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from motley.cli.app import run
from motley.kernels.device_table import DEVICES
from motley.replicas import weights


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert run(["fit", *arguments]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(told(capsys, *arguments, "--json"))
    return found


def test_no_tensor_is_read(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("a file of tensors was opened")

    monkeypatch.setattr(weights, "safe_open", opened)
    found = report(capsys, "demo", "--context", "2000", "--batch", "4")
    assert (found["fit"], found["source"]) == ("demo", "arithmetic")
    assert found["model"]["quantization"] == "gptq-int4-g64"
    assert (found["asked"]["context"], found["asked"]["batch"]) == (2000, 4)
    names = [row["device"] for row in found["rows"] if not row["device"].startswith("cuda")]
    assert names == ["cpu", *(device.name for device in DEVICES)]
    for row in found["rows"]:
        assert row["fits"]
        assert row["parts"].keys() >= {"weights", "metadata", "kv_per_1000_tokens", "activations", "graphs", "context"}
        assert (row["ttft_s"] is None) == (row["device"] == "cpu")


def test_the_table_says_that_it_is_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "demo", "--device", "cpu", "--device", "Tesla T4")
    assert "arithmetic, from headers and tables: nothing was loaded, nothing was measured" in text
    assert text.count("measured") == 1
    lines = text.splitlines()
    assert any(line.startswith("cpu ") and line.endswith("fits") for line in lines)
    assert any(line.startswith("Tesla T4 ") and line.endswith("fits") for line in lines)
    assert any(line.startswith("7.5: layer, int4: w4a16_gemv") for line in lines)


def test_what_does_not_fit_comes_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "demo", "--device", "Tesla P4", "--context", "2048", "--batch", "100000")
    assert "Tesla P4: fewer sequences fit: one alone has room for " in text
    row = report(capsys, "demo", "--device", "6.1", "--batch", "100000")["rows"][0]
    assert (row["fits"], row["tpot_s"]) == (False, None)
    assert row["advice"]


def test_cpu_weights_and_dtype_change_what_a_cpu_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    small = report(capsys, "demo", "--device", "cpu", "--dtype", "bfloat16")["rows"][0]["parts"]
    large = report(capsys, "demo", "--device", "cpu", "--dtype", "float32", "--cpu-weights", "dense")["rows"][0][
        "parts"
    ]
    assert large["weights"] > 3 * small["weights"]
    assert large["metadata"] == 0 < small["metadata"]


def test_kv_in_int8_and_memory_of_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    half, eight = (
        report(capsys, "demo", "--device", "Tesla T4", *more)["rows"][0]["parts"]
        for more in (["--swap-memory", "0"], ["--kv-dtype", "int8", "--swap-memory", "1MiB"])
    )
    assert 1.7 < half["kv_block"] / eight["kv_block"] < 2
    assert (half["staging"], half["host"]) == (8 * half["kv_block"], 0), "prefixes come and go"
    assert half["buffers"] >= 2**30
    assert (eight["staging"], eight["host"]) == (8 * eight["kv_block"], 2**20)
    cpu = report(capsys, "demo", "--device", "cpu", "--kv-dtype", "int8")["rows"][0]["parts"]
    assert cpu["kv_block"] == eight["kv_block"]
    assert "on the host" in told(capsys, "demo", "--kv-dtype", "int8", "--device", "Tesla T4")


@pytest.mark.parametrize(
    ("arguments", "expected", "code"),
    [
        (["./no-such-folder"], "there is no such folder", 1),
        (["FOLDER"], "config.json: is missing", 1),
        (["demo", "--device", "Tesla K80"], "expected cpu, cuda[:i], a capability (6.0, 6.1", 2),
        (["demo", "--device", "cuda:99"], "--device cuda:99: torch finds", 2),
        (["demo", "--context", "4096"], "--context 4096: the model was made for 2048 tokens", 2),
        (["demo", "--batch", "0"], "'--batch'", 2),
        (["demo", "--kv-dtype", "int4"], "kv_dtype: 'int4' is not accepted", 2),
        (["demo", "--dtype", "int3"], "dtype: 'int3' is not accepted", 2),
    ],
)
def test_refusals(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], expected: str, code: int
) -> None:
    given = [str(tmp_path) if argument == "FOLDER" else argument for argument in arguments]
    assert expected in " ".join(told(capsys, *given, code=code).split())


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert "motley fit ./my-gptq-model --context 32768 --batch 8" in told(capsys, "--help")
