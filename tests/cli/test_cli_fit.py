"""`motley fit`, on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from motley.cli.app import run
from motley.kernels.device.device_table import DEVICES
from motley.replicas.checkpoint.reading import weight_loader


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

    monkeypatch.setattr(weight_loader, "safe_open", opened)
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


def test_drafts_are_rows_of_larger_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts rows as the engine does: up to 64."""
    without, some, many = (
        report(capsys, "demo", "--device", "Tesla T4", "--max-running", "4", "--speculate-ngram", drafts)
        for drafts in ("0", "3", "32")
    )
    assert [each["asked"]["max_drafts"] for each in (without, some, many)] == [0, 3, 32]
    parts = [each["rows"][0]["parts"] for each in (without, some, many)]
    assert parts[0]["graphs"] < parts[1]["graphs"] < parts[2]["graphs"]
    assert parts[1]["activations"] < parts[2]["activations"]
    assert parts[0]["weights"] == parts[2]["weights"]
    assert "less than or equal to 32" in told(capsys, "demo", "--speculate-ngram", "33", code=2)


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


DIVIDED = ("demo", "--tensor-parallel", "2", "--pipeline-parallel", "2", "--pipeline-layers", "2,4")


def test_a_divided_model_is_told_process_by_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("a file of tensors was opened")

    monkeypatch.setattr(weight_loader, "safe_open", opened)
    found = report(capsys, *DIVIDED, "--device", "cpu", "--device", "Tesla T4", "--context", "1024", "--link", "pcie")
    assert (found["ranks"], found["stages"], found["layers"]) == (2, 2, [2, 4])
    cpu, t4 = found["rows"]
    assert (cpu["device"], t4["device"]) == ("cpu", "Tesla T4")
    assert [each["capability"] for each in t4["processes"]] == ["7.5"] * 4
    for row in (cpu, t4):
        assert row["fits"]
        who = [(each["stage"], each["ranks"], each["layers"]) for each in row["processes"]]
        assert who == [(0, [0], [0, 2]), (0, [1], [0, 2]), (1, [0], [2, 6]), (1, [1], [2, 6])]
        first, second = row["processes"][0]["parts"], row["processes"][2]["parts"]
        assert second["kv_block"] == 2 * first["kv_block"]
    lent = [each["parts"]["buffers"] for each in cpu["processes"]]
    assert lent[0] == lent[1] == lent[2] // 2
    assert 2**28 - 2**20 < sum(lent) <= 2**28, "what prefixes come and go through, of the replica"
    assert {each["parts"]["host"] for each in cpu["processes"]} == {0}, "KV is in its memory anyway"
    first, *others = [each["parts"] for each in t4["processes"]]
    for what, nbytes in (("buffers", 2**30), ("host", 2**20)):
        sizes = [each[what] for each in others]
        assert first[what] >= sizes[0] == sizes[1] // 2 == sizes[2] // 2 > nbytes // 7, "it is pinned by powers of two"
    scaling = found["scaling"]
    assert scaling["source"] == "model"
    assert [each["link"] for each in scaling["links"]] == ["pcie3"]
    assert [each["tensor_parallel"] for each in scaling["rows"]] == [1, 2, 4, 8]
    for each in scaling["rows"]:
        assert (each["device"], each["link"], each["pipeline_layers"]) == ("Tesla T4", "pcie3", [2, 4] * each["fits"])
        assert (each["predicted"] is None) is bool(each["refused"])
        assert each["source"] == "model"
    times = [each["predicted"] for each in scaling["rows"] if each["predicted"]]
    assert len(times) >= 2
    assert times[0]["exchange_s"] < times[1]["exchange_s"]


def test_stages_on_unequal_cards(capsys: pytest.CaptureFixture[str]) -> None:
    """A card for each, by a word of its name, by name or by capability."""
    found = report(capsys, "demo", "--stages", "p40, Tesla T4,8.9", "--tensor-parallel", "2", "--link", "ethernet")
    [row] = found["rows"]
    assert row["device"] == "Tesla P40 + Tesla T4 + NVIDIA L4"
    assert sum(row["pipeline_layers"]) == 6
    assert [each["capability"] for each in row["processes"]] == ["6.1", "6.1", "7.5", "7.5", "8.9", "8.9"]
    assert {each["parts"]["graphs"] for each in row["processes"]} == {0}, "stages launch none"
    ranks = report(capsys, "demo", "--device", "Tesla T4", "--tensor-parallel", "2")["rows"][0]["processes"]
    assert min(each["parts"]["graphs"] for each in ranks) > 0
    assert {each["device"] for each in found["scaling"]["rows"]} == {row["device"]}
    assert [each["link"] for each in found["scaling"]["links"]] == ["ethernet10", "ethernet25", "ethernet100"]
    text = told(capsys, "demo", "--stages", "p40,t4", "--link", "pcie", "--tensor-parallel", "3")
    assert "TPOT x2  TPOT x3  TPOT x4" in text
    assert "3 ranks cannot share 2 KV heads" in text
    text = told(capsys, "demo", "--stages", "p40,t4", "--link", "pcie")
    assert "1 x Tesla P40 + 1 x Tesla T4" in text
    assert "6.1, stage 0" in text
    assert "7.5, stage 1" in text


def test_stages_on_a_card_and_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Memory is told of both, each by what it has; and times of none, as no table tells them of a CPU."""
    way = ("demo", "--stages", "t4,cpu,cpu", "--pipeline-layers", "2,3,1")
    found = report(capsys, *way)
    [row] = found["rows"]
    assert (row["device"], row["pipeline_layers"], row["fits"]) == ("Tesla T4 + cpu + cpu", [2, 3, 1], True)
    assert [each["capability"] for each in row["processes"]] == ["7.5", None, None]
    card, *others = [each["parts"] for each in row["processes"]]
    assert card["context"] > 0, "of CUDA"
    assert [each["context"] for each in others] == [0, 0]
    assert [each["buffers"] for each in (card, *others)] == [0, 0, 0], "such a replica shares no prefixes"
    assert found["scaling"]["rows"] == []
    text = told(capsys, *way)
    assert "1 x Tesla T4 + cpu  " in text
    assert "no table tells how fast a CPU is, so that no time is told" in text
    assert "no time is told" not in told(capsys, "demo", "--stages", "p40,t4")


def test_the_scaling_model_says_that_it_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "demo", "--device", "NVIDIA H200", "--link", "all")
    assert "model: the roofline of each rank, and the links' latency and bandwidth; nothing was measured" in text
    lines = [line.split() for line in text.splitlines()]
    [heads] = [line for line in lines if line[:2] == ["model", "over"]]
    assert " ".join(heads[2:]) == "TPOT x1 TPOT x2 TPOT x4 TPOT x8 TTFT x1 TTFT x2 TTFT x4 TTFT x8"
    for name in ("nvlink", "pcie3", "pcie4", "pcie5", "ethernet10", "ethernet25", "ethernet100"):
        assert any(line[:3] == ["NVIDIA", "H200", name] for line in lines), name
    assert "[1] NVIDIA H200 datasheet" in text
    assert "uncertain: half of the 23 us" in text


@pytest.mark.parametrize(
    ("arguments", "expected", "code"),
    [
        (["demo", "--link", "usb"], "--link usb: expected nvlink, pcie, ethernet or all", 2),
        (["demo", "--pipeline-parallel", "2", "--pipeline-layers", "1,2,3"], "--pipeline-layers", 2),
        (["demo", "--stages", "p40,t4", "--pipeline-parallel", "3"], "it gives 2 stages and their devices", 2),
        (["demo", "--stages", "p40,t4", "--device", "8.9"], "leave out --device", 2),
        (["demo", "--stages", "p40,k80"], "device: 'k80' is not in the table", 2),
        (["demo", "--tensor-parallel", "0"], "'--tensor-parallel'", 2),
        (["./no-such-folder"], "there is no such folder", 1),
        (["FOLDER"], "config.json: is missing", 1),
        (["demo", "--device", "Tesla K80"], "expected cpu, cuda[:i], a capability (6.0, 6.1", 2),
        (["demo", "--device", "cuda:99"], "--device cuda:99: torch finds", 2),
        (["demo", "--context", "4096"], "--context 4096: the model accepts at most 2048 tokens", 2),
        (["demo", "--batch", "0"], "'--batch'", 2),
        (["demo", "--kv-dtype", "int4"], "--kv-dtype: 'int4' is not accepted", 2),
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


def test_weights_in_tiers_are_told_with_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "demo", "--device", "cpu", "--weights-memory", "3MiB")["rows"][0]
    tiers, expected = found["tiers"], found["expected"]
    assert tiers["layers"]
    assert found["parts"]["weights"] <= tiers["memory_bytes"] <= 3 << 20
    assert tiers["read_bytes"] > 0
    assert expected["source"] == "measured in parts"
    assert expected["step_s"] == found["tpot_s"] == pytest.approx(1 / expected["tokens_per_s"])
    assert expected["bytes_per_s"] > 0
    text = told(capsys, "demo", "--device", "cpu", "--weights-memory", "3MiB")
    assert "cpu: weights: " in text
    assert "tokens/s expected of one sequence" in text
