"""`motley profile`: what it counts equals hand arithmetic, what it times sums, and what is slow is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gptq_files import build_gptq
from late_device import LateDevice, LateOps
from profiled import SMALL, Slow, decoder, loaded, profiled
from tiny_checkpoints import build_checkpoint

from motley.kernels.batch import StepBatch
from motley.kernels.canonical_weights import GroupedWeight
from motley.kernels.cpu.cpu_ops import CpuOps
from motley.kernels.cpu.layers.linear_settings import CpuLinearSettings
from motley.kernels.cpu.layers.torch_linear import TorchInt4Linear
from motley.replicas.errors import InvalidRequest
from motley.replicas.gpu.gpu_runner import GpuRunner
from motley.replicas.model.parts.layer_source import FusedLinear
from motley.replicas.profiling import call_work
from motley.replicas.profiling.layer_folding import fold_layers, format_ranges
from motley.replicas.profiling.module_tree import ModuleNode
from motley.replicas.profiling.profile_driver import ProfileDriver
from motley.replicas.profiling.profiler import Profile, ProfileOptions, ProfilePhase
from motley.replicas.profiling.report.html_page import render_page
from motley.replicas.profiling.report.text_report import render_text, to_json_report
from motley.replicas.profiling.step_clock import HostClock
from motley.replicas.profiling.stored_weights import stored_weights

ROW = {"metric", "workload", "unit", "value", "p20", "p50", "p80", "peer", "peer_value", "ratio", "source"}  # DESIGN 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hidden 128, inner 256, 4 heads of 32, 2 KV heads, vocabulary 256; int4 in groups of 32, an untied head."""
    return build_gptq(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def found(folder: Path) -> Profile:
    return profiled(loaded(folder))


def leaves(phase: ProfilePhase) -> dict[str, ModuleNode]:
    return {node.path: node for node in phase.step.walk() if node.facts}


def test_bytes_and_flops_of_a_prefill_are_those_of_hand_arithmetic(folder: Path) -> None:
    """The prompt has 20 tokens, in bf16: two bytes each."""
    model = loaded(folder)
    phase = profiled(model).phases[0]
    inner = decoder(model).layers[1]
    by_hand = {
        "embedding": (2 * 20 * 128 * 2, 0),
        "rotary_table": (2 * 2 * 20 * 16 * 4, 0),  # cosines and sines in fp32
        "layers.0.input_norm": ((2 * 20 * 128 + 128) * 2, 4 * 20 * 128),  # nothing to add yet
        "layers.1.input_norm": ((4 * 20 * 128 + 128) * 2, 5 * 20 * 128),
        "layers.1.attention.qkv": (inner.attention.qkv.held.nbytes + 20 * (128 + 256) * 2, 2 * 20 * 128 * 256),
        "layers.1.attention.rotary_write": (2 * 20 * (4 + 2 + 2) * 32 * 2 + 2 * 20 * 16 * 4, 3 * 20 * (4 + 2) * 32),
        "layers.1.attention.paged_attention": (2 * 20 * 128 * 2 + 2 * 20 * 64 * 2, 4 * 4 * 32 * (20 * 21 // 2)),
        "layers.1.attention.o": (inner.attention.o.held.nbytes + 20 * (128 + 128) * 2, 2 * 20 * 128 * 128),
        "layers.1.post_attention_norm": ((4 * 20 * 128 + 128) * 2, 5 * 20 * 128),
        "layers.1.mlp.gate_up": (inner.mlp.gate_up.held.nbytes + 20 * (128 + 512) * 2, 2 * 20 * 128 * 512),
        "layers.1.mlp.silu_mul": (3 * 20 * 256 * 2, 5 * 20 * 256),
        "layers.1.mlp.down": (inner.mlp.down.held.nbytes + 20 * (256 + 128) * 2, 2 * 20 * 256 * 128),
        "norm": ((4 * 128 + 128) * 2, 5 * 128),  # of the last token alone
        "head": (decoder(model).head.held.nbytes + 128 * 2 + 256 * 4, 2 * 128 * 256),  # logits in fp32
    }
    counted = leaves(phase)
    assert {path: (counted[path].work.moved, counted[path].work.operations) for path in by_hand} == by_hand
    assert {path.replace("layers.0", "layers.1") for path in counted if "layers" not in path or "s.0" in path} == {
        path.replace("layers.0", "layers.1") for path in by_hand
    }
    assert phase.step.work.operations == sum(node.work.operations for node in counted.values())
    assert phase.step.work.moved == sum(node.work.moved for node in counted.values())
    # Codes, zero points, scales in fp16 and the group of each input, as the checkpoint has them.
    stored = 256 * 128 // 2 + 8 * 128 // 2 + 8 * 128 * 2 + 256 * 4
    assert counted["layers.1.mlp.down"].work.needed == min(stored, inner.mlp.down.held.nbytes) + 20 * (256 + 128) * 2


def test_a_decode_step_counts_each_sequences_context(folder: Path) -> None:
    """Three at 8 tokens: one by the prefill, two steps that warm up, one without instruments, then this one."""
    decode = profiled(
        loaded(folder), ProfileOptions(prompt_tokens=4, batch=3, context_tokens=8, steps=1, repeats=1)
    ).phases[1]
    attention = leaves(decode)["layers.2.attention.paged_attention"].work
    assert attention.operations == 4 * 4 * 32 * 3 * 12
    assert attention.moved == 2 * 3 * 128 * 2 + 2 * 3 * 12 * 64 * 2
    assert leaves(decode)["head"].work.operations == 3 * 2 * 128 * 256
    assert decode.workload == {"batch": 3, "context_tokens": 10}


def test_each_phase_knows_what_its_own_modules_were_called_with(folder: Path) -> None:
    """Configs of a GPU's kernels go by rows."""
    model = loaded(folder)
    driver = ProfileDriver(model.built, stored_weights(model.checkpoint), HostClock(), SMALL)
    prefill, decode = driver.prefill(), driver.decode()
    assert prefill.seen["layers.3.mlp.down"] == (torch.bfloat16, 20)
    assert prefill.seen["head"] == (torch.bfloat16, 1)
    assert {seen.rows for seen in decode.seen.values()} == {3}
    assert prefill.parts.keys() == decode.parts.keys() == prefill.seen.keys()


class PromptDevice(LateDevice):
    """Does what it is given at once, so that the host's clock tells when."""

    def submit(self, work: Callable[[], None]) -> None:
        super().submit(work)
        self.mark().wait()


def test_a_runner_with_graphs_is_measured_as_served_and_looked_into_step_by_step(folder: Path) -> None:
    model = loaded(folder, ops=LateOps(), accelerator=PromptDevice())
    runner = model.built.runner
    assert isinstance(runner, GpuRunner)
    graphs = runner.graphs
    assert graphs is not None
    result = profiled(model)
    assert runner.graphs is graphs
    assert {key.batch for key in graphs.captured} == {4}  # three sequences, padded
    for phase, rows in zip(result.phases, (20, 3), strict=True):
        found = leaves(phase)
        assert found["layers.3.mlp.down"].work.operations == 2 * rows * 256 * 128
        assert {node.name for node in phase.step.children} == {"schedule", "prepare", "model", "sample"}
        assert all(len(phase.step.samples) == len(node.samples) for node in phase.step.walk())
    assert len(result.phases[1].plain_s) == SMALL.steps


def batch_of(*sequences: tuple[int, int]) -> StepBatch:
    """Return a batch of (tokens seen at the end, new ones)."""
    starts = [0]
    for _, new in sequences:
        starts.append(starts[-1] + new)
    none = torch.empty(0)
    lengths = tuple(seen for seen, _ in sequences)
    return StepBatch(none, none, none, tuple(starts), lengths, none, none, 0)


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize("sequences", [((1, 1),), ((9, 1), (4, 1)), ((12, 5), (3, 3), (30, 2))])
def test_attention_counts_the_pairs_that_a_window_lets_through(sequences: Any, window: int | None) -> None:
    positions = [range(seen - new, seen) for seen, new in sequences]
    keys = [[range(max(0, p - (window or p + 1) + 1), p + 1) for p in each] for each in positions]
    pairs = sum(len(one) for each in keys for one in each)
    rows = sum(len(set().union(*each)) for each in keys)
    q, cache = torch.empty(sum(map(len, positions)), 4, 8), torch.empty(5, 2, 2, 8 * 16)
    counted = call_work.attention_work(2)((q, cache, batch_of(*sequences), 1.0, window), q)
    assert counted.operations == 4 * 4 * 8 * pairs
    assert counted.moved == 2 * q.nbytes + 2 * rows * 2 * 8 * 4
    flat = torch.empty(99, dtype=torch.uint8)  # int8, with a scale for each vector, in one tensor
    assert (
        call_work.attention_work(2)((q, flat, batch_of(*sequences), 1.0, window), q).moved
        == 2 * q.nbytes + 2 * rows * 2 * 12
    )


def test_times_and_shares_sum_to_the_step(found: Profile) -> None:
    for phase in found.phases:
        for step in (phase.step, fold_layers(phase.step)):
            for node in step.walk():
                if node.children:
                    assert node.seconds == pytest.approx(sum(child.seconds for child in node.children))
                    assert node.samples == pytest.approx(
                        [sum(s) for s in zip(*(c.samples for c in node.children), strict=True)]
                    )
                    assert node.work.moved == sum(child.work.moved for child in node.children)
            assert [child.name for child in step.children] == ["schedule", "prepare", "model", "sample"]
            ends = [node for node in step.walk() if not node.children]
            assert sum(node.seconds / step.seconds for node in ends) == pytest.approx(1.0)


def test_layers_that_are_alike_are_folded(found: Profile) -> None:
    model = fold_layers(found.phases[1].step).children[2]
    names = [child.name for child in model.children]
    assert names == ["rotary_table", "embedding", "layers 0–3", "norm", "head", "between"]
    layers = model.children[2]
    assert layers.spread is not None
    assert (len(layers.spread.each_s), sum(layers.spread.each_s)) == (4, pytest.approx(layers.seconds))
    assert format_ranges([5, 0, 1, 2]) == "0–2, 5"


def test_the_engine_is_left_as_it_was(folder: Path) -> None:
    model = loaded(folder)
    layer, runner = decoder(model).layers[0], model.built.runner
    before = (layer.ops, layer.attention.qkv, layer.mlp.ops, decoder(model).embedding, decoder(model).head)
    profiled(model)
    after = (layer.ops, layer.attention.qkv, layer.mlp.ops, decoder(model).embedding, decoder(model).head)
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert "run" not in vars(runner)
    assert "forward" not in vars(decoder(model))
    assert not model.built.core.busy
    model.built.core.scheduler.pool.check_idle()


DENSE_BYTES = 2 * 128 * 256  # of `down`, in bf16


@pytest.mark.parametrize(
    ("kernel", "nbytes", "dtype", "cause"),
    [
        ("torch-dense", DENSE_BYTES, "bfloat16", "weights written out"),
        ("torch-int4", DENSE_BYTES // 4, "float32", "int4pack with activations that are not bf16"),
        ("c-int4", None, "bfloat16", "none that is known"),
    ],
)
def test_a_layer_that_is_slow_is_named_with_its_cause(
    folder: Path, kernel: str, nbytes: int | None, dtype: str, cause: str
) -> None:
    model = loaded(folder, dtype=dtype, cpu_weights="int4")
    inner = decoder(model).layers[2].mlp.down
    assert isinstance(inner, FusedLinear)
    usual = inner.parts[0].kernel
    slow: Any = Slow(inner, usual if nbytes is None else kernel, inner.held.nbytes if nbytes is None else nbytes)
    decoder(model).layers[2].mlp.down = slow
    result = profiled(model)
    for phase in result.phases:
        first = phase.findings[0]
        assert (first.modules, first.layers, first.against) == (("mlp.down",), "2", "siblings")
        assert first.factor > 5
        assert first.cause.startswith(cause)
        assert first.remedy
        assert first.paths == ("layers.2.mlp.down",)
        assert f"mlp.down of layer 2 ({first.kernel}) takes" in render_text(result)
        assert f"likely cause: {first.cause}" in render_text(result)
    assert render_page(result).count("<tr class='linear off'>") >= 2  # one in each phase
    names = [child.name for child in fold_layers(result.phases[0].step).children[2].children]
    apart = nbytes is not None
    assert names[2:-3] == (["layers 0–1, 3", "layer 2"] if apart else ["layers 0–3"])


def test_a_real_operator_that_is_slow_is_named_with_its_cause(folder: Path) -> None:
    """torch's int4 product of fp32 activations, which takes some twenty times as long as the other layers'."""
    model = loaded(folder, dtype="float32", cpu_weights="int4")
    mlp = decoder(model).layers[2].mlp
    assert isinstance(mlp.down, FusedLinear)
    assert mlp.down.parts[0].kernel != TorchInt4Linear.kernel
    codes = torch.randint(0, 16, (128, 256), dtype=torch.uint8)
    weight = GroupedWeight(codes, torch.rand(128, 8) / 100, torch.full((128, 8), 8, dtype=torch.uint8), 4, 32)
    slow = TorchInt4Linear(weight, CpuLinearSettings(torch.bfloat16, torch.float32, "fast", None, None))
    slow._scales = slow._scales.float()  # of the type of x
    mlp.down = slow
    for phase in profiled(model).phases:
        first = phase.findings[0]
        assert (first.modules, first.layers, first.against) == (("mlp.down",), "2", "siblings")
        assert first.kernel == "torch-int4"
        assert first.cause.startswith("int4pack with activations that are not bf16")


def test_without_a_compiler_the_profile_says_so(folder: Path) -> None:
    ops = CpuOps(torch.bfloat16, "exact", None, None, "no C kernels: no C compiler (gcc or cc) on PATH")
    result = profiled(loaded(folder, ops=ops))
    told = {module: each for each in result.phases[1].findings for module in each.modules if each.against == "roofline"}
    attention = told["attention.paged_attention"]
    assert attention.cause == "no C kernels: torch's operators do it"
    assert attention.chosen == "no C kernels: no C compiler (gcc or cc) on PATH"
    assert (attention.layers, attention.kernel) == ("0–3", "torch")
    assert "install gcc" in attention.remedy


def test_weights_that_are_written_out_in_every_layer_are_told_by_their_bytes(tmp_path: Path) -> None:
    """No sibling is faster, and a roofline that is measured beside other work may be low."""
    folder = build_gptq(tmp_path, "llama", intermediate_size=2048)
    phase = profiled(loaded(folder, dtype="float32")).phases[1]  # the default then: dense
    told = next(each for each in phase.findings if each.against == "bytes")
    assert told.modules == ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")
    assert (told.layers, told.cause) == ("0–1", "weights written out: quantized in the checkpoint, dense on the device")
    works = [leaves(phase)[path].work for path in told.paths]
    assert told.factor == sum(each.moved for each in works) / sum(each.needed for each in works)
    assert 4 < told.factor < 8  # 32 bits for 4.9, and activations
    assert f" move {told.factor:.3g} times the bytes that are needed: " in told.text
    assert "--dtype bfloat16" in told.remedy


def test_rows_have_the_form_of_every_measurement(found: Profile) -> None:
    report = json.loads(json.dumps(to_json_report(found)))
    assert report["bench"] == "profile"
    assert report["roofline"]["bandwidth"] == {"value": 1e10, "source": "measured", "how": "given"}
    assert all(set(row) >= ROW for row in report["rows"])
    assert {row["metric"]: row["source"] for row in report["rows"]} == {
        "step without instruments": "measured", "time": "measured", "share": "measured", "bytes": "static",
        "FLOPs": "static",
    }  # fmt: skip
    for phase in ("prefill", "decode"):
        rows = [row for row in report["rows"] if row["workload"]["phase"] == phase]
        share = {row["workload"]["module"]: row["value"] for row in rows if row["metric"] == "share"}
        assert share["step"] == 1.0
        assert sum(share[f"step > {name}"] for name in ("schedule", "prepare", "model", "sample")) == pytest.approx(1)
        head = next(r for r in rows if r["metric"] == "time" and r["workload"]["module"] == "step > model > head")
        assert (head["peer"], head["peer_source"]) == ("roofline", "measured")
        assert head["ratio"] == pytest.approx(head["peer_value"] / head["value"])


def test_the_page_holds_all_and_needs_nothing(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "<script>alert(1)", "qwen3", dtype="bfloat16")
    asked = ProfileOptions(prompt_tokens=4, batch=1, context_tokens=4, steps=1, repeats=1)
    result = profiled(loaded(folder, asked), asked)
    shown = render_page(result)
    assert "<script>" not in shown
    assert "<h1>&lt;script&gt;alert(1)</h1>" in shown
    assert not any(word in shown for word in ("http", "src=", "@import", "url("))
    for phase in result.phases:
        for node in fold_layers(phase.step).walk():
            assert f">{node.name}</th>" in shown
    told = render_text(result)
    assert "10 GB/s, measured: given" in told
    assert "q_norm" in told
    assert "decode of 1 at context " in told


def test_what_there_is_no_room_for_is_refused_by_name(folder: Path) -> None:
    model = loaded(folder)
    for asked, names in (
        (ProfileOptions(prompt_tokens=256), "prompt_tokens: 256 and 1 more exceed the context of 256 tokens"),
        (ProfileOptions(context_tokens=250), "context_tokens: 250 and 37 more exceed the context of 256 tokens"),
        (ProfileOptions(batch=40, context_tokens=8), "batch: 40 sequences need 120 blocks of KV, and there are 64"),
        (ProfileOptions(batch=65, context_tokens=8), "batch: 65 sequences, and this engine runs 64 at a time"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            profiled(model, asked)
        assert names in str(refused.value)
        assert refused.value.param == names.partition(":")[0]
    usual = profiled(model, ProfileOptions(steps=1, repeats=1))  # what fits, where 512 do not
    assert usual.phases[0].workload["prompt_tokens"] == 255


def test_a_step_that_fails_ends_the_profile(folder: Path) -> None:
    model = loaded(folder)

    def broken(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    slow: Any = Slow(broken, "c-int4", 1, times=1)
    decoder(model).layers[0].mlp.down = slow
    with pytest.raises(Exception, match="the step failed: no such kernel"):
        profiled(model, SMALL)
