"""The engine on the operators of GPUs, computed by Triton's interpreter in fp16, beside the CPU's in fp32."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from awq_files import build_awq
from fp8_files import build_fp8
from gptq_files import build_gptq
from late_device import LateDevice
from thorough import thorough

from motley.kernels.device import device_context
from motley.kernels.device.device_context import interpreter_context
from motley.kernels.gpu import config_cache
from motley.kernels.gpu.gpu_ops import GpuOps
from motley.kernels.ops import choose_dtype, ops_for_device
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.errors import InvalidRequest
from motley.replicas.loading import operator_choice
from motley.replicas.sampling_params import SamplingParams

# The least that int4 tiles hold.
SHAPE = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
# What has no tensor cores takes a second for each row here.
SMALL = {**SHAPE, "num_attention_heads": 2, "num_key_value_heads": 1}
SHORT = [[3, 141, 59, 26, 5], [40, 41]]
PROMPTS = [[3, 141, 59, 26, 5], list(range(40, 60))]


@contextmanager
def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> Iterator[GpuOps]:
    """Engines that are built inside compute as that capability would."""
    ops = GpuOps(interpreter_context(capability))
    with monkeypatch.context() as patch:
        patch.setattr(operator_choice, "ops_for_device", lambda *_, **__: ops)
        yield ops


def answers(engine: Engine, prompts: list[list[int]] = PROMPTS, **sampling: Any) -> list[Any]:
    params = SamplingParams(**{"max_tokens": 2, "temperature": 0.0, "logprobs": 3, "ignore_eos": True, **sampling})
    return [output for result in engine.generate(prompts, params) for output in result.outputs]


def distance(found: list[Any], expected: list[Any]) -> float:
    """The largest difference of a log-probability, of tokens up to where texts part."""
    most = 0.0
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            if mine.token_id != theirs.token_id:
                break
            most = max(most, abs(mine.logprob - theirs.logprob))
    return most


@pytest.mark.parametrize(
    ("family", "flavour", "capability"),
    [
        ("qwen2", {"bits": 4, "desc_act": True}, (6, 1)),  # biases, and features in the order of their groups
        ("qwen3", {"bits": 4, "group_size": 128, **SHAPE}, (8, 0)),  # heads are normalised
        *thorough(("mistral", {"bits": 4, "sliding_window": 4}, (7, 5)), ("llama", {"bits": 8}, (6, 1))),
    ],
)
def test_greedy_texts_are_those_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, flavour: dict[str, Any], capability: tuple[int, int]
) -> None:
    folder = build_gptq(tmp_path, family, **{**SMALL, **flavour})
    prompts = PROMPTS if capability >= (8, 0) else SHORT
    expected = answers(Engine(folder, dtype="float32", threads=1), prompts)
    with on_gpu(monkeypatch, capability):
        found = answers(Engine(folder, dtype="float16", threads=1), prompts)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    # fp16 rounds eight times finer than bf16, in which the CPU's engine computes; W8A8 has a rounding of its own.
    if flavour["bits"] == 4:
        assert distance(found, expected) < 0.5 * distance(
            answers(Engine(folder, dtype="bfloat16", threads=1), prompts), expected
        )


@pytest.mark.thorough
def test_awq_goes_through_the_same_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, dense = build_awq(tmp_path, "qwen2", group_size=64, **SMALL)
    expected = answers(Engine(dense, dtype="float32", threads=1), SHORT)
    with on_gpu(monkeypatch, (7, 5)) as ops:
        found = answers(Engine(folder, dtype="float16", threads=1), SHORT)
        assert ops.choices["layer, int4"].startswith("w4a16")
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    rounded = answers(Engine(dense, dtype="bfloat16", threads=1), SHORT)
    assert distance(found, expected) < 0.5 * distance(rounded, expected)


def test_fp8_is_computed_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are rounded to e4m3, which is all that is lost: a sixteenth at most of each."""
    folder, dense = build_fp8(tmp_path, "qwen2", **SHAPE)
    expected = answers(Engine(dense, dtype="float32", threads=1))
    with on_gpu(monkeypatch, (8, 9)) as ops:
        found = answers(Engine(folder, dtype="float16", threads=1))
        assert ops.choices["layer, fp8"] == "fp8"
    assert 0 < distance(found, expected) < 0.5


def test_kv_in_int8_takes_half_the_memory_and_rounds_that_much(tmp_path: Path) -> None:
    """Prompts, decodes, both kernels of attention: as far from fp16 as one part in 254 of a vector explains."""
    folder = build_gptq(tmp_path, "qwen2", **SHAPE)
    engines = [
        Engine(
            folder, dtype="float16", threads=1, ops=GpuOps(interpreter_context((8, 0)), kv_dtype), kv_memory_bytes=2**22
        )
        for kv_dtype in (None, "int8")
    ]
    half, eight = (answers(engine) for engine in engines)
    assert 0 < distance(eight, half) < 0.05
    blocks = [engine._built.profile.kv_blocks_total for engine in engines]
    assert blocks[1] * (64 + 4) == pytest.approx(blocks[0] * 2 * 64, rel=0.02)
    prints = {engine._built.profile.fingerprint for engine in engines}
    assert len(prints) == 2, "KV is not shared between them"
    with pytest.raises(InvalidRequest, match="kv_dtype: 'int4' is not accepted"):
        Engine(folder, kv_dtype="int4")


def test_a_prompt_in_parts_beside_one_that_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both attention kernels in a step, tables that begin anywhere; and the second time no table is read."""
    folder = build_gptq(tmp_path, "qwen2", **SHAPE)
    expected = answers(Engine(folder, dtype="float32", threads=1))

    def again(*_: Any) -> None:
        raise AssertionError("a table was read in a step that is like one before")

    with on_gpu(monkeypatch, (8, 0)):
        engine = Engine(folder, dtype="float16", threads=1, max_batch_tokens=16, max_running=8, reuse_prefixes=False)
        assert [each.token_ids for each in answers(engine)] == [each.token_ids for each in expected]
        monkeypatch.setattr(config_cache, "choose_config", again)
        assert [each.token_ids for each in answers(engine)] == [each.token_ids for each in expected]


def test_what_kernels_do_not_take_is_written_out_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A K that is no multiple of a tile; int8 on a capability without dp4a."""
    narrow = build_gptq(tmp_path / "narrow", "llama", **{**SHAPE, "hidden_size": 96})
    expected = answers(Engine(narrow, dtype="float32", threads=1), max_tokens=1)
    with on_gpu(monkeypatch, (8, 0)) as ops:
        found = answers(Engine(narrow, dtype="float16", threads=1), max_tokens=1)
        assert "written out: 4 bits and" in ops.choices["layer, int4"]
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    eight = build_gptq(tmp_path / "eight", "llama", bits=8, **SHAPE)
    with on_gpu(monkeypatch, (6, 0)) as ops:
        Engine(eight, dtype="float16", threads=1)
        assert "written out: int8: compute capability 6.0 does not use it" in ops.choices["layer, int8"]
    odd = build_gptq(tmp_path / "odd", "llama", **{**SHAPE, "head_dim": 32})
    with on_gpu(monkeypatch, (8, 0)), pytest.raises(ValueError, match="head_dim: 32 has no kernel"):
        Engine(odd, dtype="float16", threads=1)


@pytest.mark.thorough
def test_graphs_of_these_operators_are_fed_by_the_device(tmp_path: Path) -> None:
    """Decode as a graph, tokens chosen by the kernel: the texts of steps that run as they come, greedy and seeded."""
    folder = build_gptq(tmp_path, "qwen2", **SHAPE)
    engine = {"dtype": "float16", "threads": 1, "max_running": 4}
    found = []
    for graphs in (True, False):
        device = LateDevice(recorded=False)
        one = Engine(folder, ops=GpuOps(interpreter_context((8, 0))), accelerator=device, graphs=graphs, **engine)
        greedy = answers(one, logprobs=None)
        seeded = answers(one, logprobs=None, temperature=1.0, top_k=30, top_p=0.9, seed=1)
        penalised = answers(one, logprobs=None, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=3)
        found.append([output.token_ids for output in [*greedy, *seeded, *penalised]])
        assert (device.captures > 0) == graphs
    assert found[0] == found[1]
    assert found[0][:2] != found[0][2:4]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda"}, "device: cuda: there is no CUDA device that torch can use; motley doctor tells why"),
        ({"device": "cuda:3"}, "device: cuda:3: there is no CUDA device"),
        ({"device": "xpu"}, "device: xpu has no operators; expected cpu or cuda"),
        ({"device": "nonsense"}, "device: 'nonsense' is none"),
    ],
)
def test_a_device_that_is_not_here_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    folder = build_gptq(tmp_path, "qwen2", **SHAPE)
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        Engine(folder, **settings)


def test_of_a_gpu_only_what_it_computes_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of a stand-in for the GPU that torch would show."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(device_context, "gpu_context", lambda _: interpreter_context((7, 5)))
    dtype, why = choose_dtype("cuda", torch.bfloat16)
    assert (dtype, why[:24]) == (torch.float16, "compute capability 7.5: ")
    assert ops_for_device("cuda", torch.float16).arithmetic == "gpu-7.5-fp16-fast"
    with pytest.raises(ValueError, match="numerics: exact is not computed on a GPU"):
        ops_for_device("cuda", torch.float16, "exact")
    with pytest.raises(ValueError, match="is not what cuda:0 computes in; expected float16"):
        ops_for_device("cuda", torch.float32)
    with pytest.raises(ValueError, match="device: cuda:1: there are 1 CUDA devices"):
        ops_for_device("cuda:1", torch.float16)


def test_rows_that_no_kernel_was_compiled_for_are_refused() -> None:
    ops = GpuOps(interpreter_context((6, 1)))
    with pytest.raises(ValueError, match="hidden_size: 200 is not a multiple of 16"):
        ops.rms_norm(torch.ones(1, 200), torch.ones(200), 1e-6)
    with pytest.raises(ValueError, match="intermediate_size: 200"):
        ops.silu_mul(torch.ones(1, 400))


def test_the_dtype_is_that_of_the_policy() -> None:
    assert GpuOps(interpreter_context((6, 1))).dtype == torch.float16
