"""`bench engine`: the report's arithmetic, the sides' protocol, and a run of all that is installed."""

import json
import math
from importlib.util import find_spec

import pytest
from demo_model import demo_quality
from demo_model.plain_model import load_plain
from tokenizers import Tokenizer

from motley.replicas.demo import demo_path
from motley.replicas.host import measurement_rows
from motley.replicas.loading.model_loader import load_model
from motley_bench.checkpoints import random_checkpoint
from motley_bench.engine import arithmetic_accuracy, engine_throughput, int8_kv
from motley_bench.reporting.report_table import table
from motley_bench.sides import side_handles


def test_row_has_quantiles_and_a_ratio_above_one_when_better():
    fast, slow = [10.0, 20.0, 30.0, 40.0, 50.0], [15.0]
    row = measurement_rows.row("decode", {"batch": 1}, "tokens/s", fast, peer="p", peer_samples=slow)
    assert (row["p20"], row["value"], row["p80"], row["ratio"]) == (18.0, 30.0, 42.0, 2.0)
    row = measurement_rows.row("latency", {}, "ms", fast, peer="p", peer_samples=slow, higher_is_better=False)
    assert row["ratio"] == 0.5
    assert row["source"] == "measured"


def test_absent_peer_has_no_ratio():
    row = measurement_rows.row("decode", {}, "tokens/s", [1.0], peer="llama.cpp")
    assert row["peer_value"] == measurement_rows.NOT_INSTALLED
    assert row["ratio"] is None
    assert measurement_rows.NOT_INSTALLED in table({"rows": [row]})


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="qwen9"):
        engine_throughput.run(shape="qwen9")
    with pytest.raises(ValueError, match="ollama"):
        engine_throughput.run(shape="tiny", peers=["ollama"])
    with pytest.raises(ValueError, match="speculate_ngram: 33"):
        engine_throughput.run(shape="tiny", speculate_ngram=33)


def test_a_side_that_dies_says_why(tmp_path):
    with (
        side_handles.SideProcess("transformers", tmp_path, 1) as side,
        pytest.raises(side_handles.SideError, match=r"config\.json"),
    ):
        side.wait_until_loaded()


def test_shape_is_the_checkpoint_that_loads(tmp_path):
    from motley.kernels.ops import ops_for_device

    shape = random_checkpoint.SHAPES["tiny"]
    random_checkpoint.write_gptq(shape, tmp_path)
    loaded = load_model(tmp_path, ops_for_device("cpu"))
    assert loaded.config.num_layers == shape.num_hidden_layers
    assert loaded.quantization == "gptq-int4-g128"
    assert random_checkpoint.SHAPES["qwen2-0.5b"].layer_weights == 357_826_560
    assert random_checkpoint.SHAPES["qwen2-0.5b"].head_weights == 136_134_656


@pytest.mark.slow("Eight kinds of arithmetic each compute 200 tokens of text")
def test_other_arithmetic_is_measured_beside_fp32():
    """Over the same weights, which the reference has written out; one side computes as the reference does."""
    text = (demo_path() / "heldout.txt").read_text(encoding="utf-8")
    result = json.loads(json.dumps(arithmetic_accuracy.run(demo_path(), text, tokens=200, threads=1)))
    found = {}
    for row in result["rows"]:
        settings = ", ".join(f"{key} {value}" for key, value in row["workload"].items() if key != "tokens")
        found.setdefault(row["metric"], {})[settings] = row["value"]
    apart = found["divergence"]
    assert len(apart) == len(arithmetic_accuracy.CPU_SETTINGS)
    assert apart["dtype float32"] == pytest.approx(0, abs=1e-7)
    assert 0 < apart["dtype float32, kv_dtype int8"] < apart["dtype bfloat16, kv_dtype int8"] < 0.01
    assert found["same most likely token"]["dtype float32"] == 1
    [reference] = {row["peer_value"] for row in result["rows"] if row["metric"] == "perplexity"}
    assert reference == pytest.approx(found["perplexity"]["dtype float32"])
    with pytest.raises(ValueError, match="text: there is nothing to predict"):
        arithmetic_accuracy.run(demo_path(), "", threads=1)


@pytest.mark.slow("Three runs load two engines each, and transformers computes the loss too")
def test_kv_in_int8_is_measured_beside_what_it_replaces():
    """The rows, and that each side has the KV it stands for."""
    text = (demo_path() / "heldout.txt").read_text(encoding="utf-8")
    reported = []
    result = int8_kv.run(
        demo_path(), text, dtypes=["float32"], tokens=600, batches=[2], contexts=[20], output_tokens=8, threads=1,
        progress=lambda what, begun, total: reported.append((begun, total)),
    )  # fmt: skip
    rows = {row["metric"]: row for row in json.loads(json.dumps(result))["rows"]}
    assert reported == [(1, 3), (2, 3), (3, 3)]
    assert rows["KV of 1,000 tokens"]["ratio"] == pytest.approx(64 * 4 / (64 + 4))
    assert 0 < rows["divergence, KV in int8"]["value"] < 0.001
    assert 0.98 < rows["same most likely token"]["value"] <= 1
    assert rows["perplexity"]["peer"] == "KV in float32"
    assert rows["perplexity"]["value"] != rows["perplexity"]["peer_value"]
    tokenizer = Tokenizer.from_file(str(demo_path() / "tokenizer.json"))
    ids = tokenizer.encode(text).ids[:601]
    loss = demo_quality.held_out_loss(load_plain(demo_path()), ids)
    assert math.log(rows["perplexity"]["peer_value"]) == pytest.approx(loss, rel=1e-4), "by transformers"
    assert rows["decode"]["ratio"] > 0
    with pytest.raises(ValueError, match="context: 2040 and 8 more tokens exceed the model's 2048"):
        int8_kv.run(demo_path(), text, dtypes=["float32"], contexts=[2040], output_tokens=8)
    with pytest.raises(ValueError, match="text: there is nothing to predict"):
        int8_kv.run(demo_path(), "", dtypes=["float32"], contexts=[20])


@pytest.mark.thorough
def test_run_measures_every_installed_side(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native = side_handles.is_installed
    has_llama = find_spec("llama_cpp") is not None and find_spec("gguf") is not None
    monkeypatch.setattr(
        engine_throughput, "is_installed", lambda name: name == "llama.cpp" and has_llama and native(name)
    )
    reported = []

    def tell(what: str, begun: int, total: int) -> None:
        reported.append((begun, total))

    result = engine_throughput.run(
        "tiny", [2], prompt_tokens=32, output_tokens=8, context_tokens=20, threads=1, repeats=1, speculate_ngram=4,
        progress=tell,
    )  # fmt: skip
    rows = json.loads(json.dumps(result))["rows"]
    assert result["bench"] == "engine"
    assert reported == [
        (begun, len(reported)) for begun in range(1, len(reported) + 1)
    ]  # one step at a time, to the last
    decode = {row["peer"]: row for row in rows if row["metric"] == "decode"}
    assert decode["transformers"]["peer_value"] == measurement_rows.NOT_INSTALLED
    assert decode["transformers"]["value"] > 0
    assert (decode["llama.cpp"]["ratio"] is not None) == has_llama
    drafts = {row["metric"]: row["value"] for row in rows if row["workload"].get("drafts") == 4}
    assert drafts["decode with drafts"] > 0
    assert 0 <= drafts["drafts accepted"] <= 1 <= drafts["tokens per step"] <= 5
    shares = [row["value"] for row in rows if row["metric"] == "profile"]
    assert sum(shares) == pytest.approx(1.0)
    read = next(row for row in rows if row["metric"] == "weights read per token")
    for metric in ("prefill", "decode", "weights read per token"):
        named = {row["peer"]: row["peer_value"] for row in rows if row["metric"] == metric}
        assert set(named) == {"transformers", "llama.cpp"}, metric
        assert named["transformers"] == measurement_rows.NOT_INSTALLED
    shape = random_checkpoint.SHAPES["tiny"]
    assert shape.layer_weights / 2 + shape.head_weights < read["value"] < shape.layer_weights + 2 * shape.head_weights
