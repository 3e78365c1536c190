"""Figures that `fit_model` gives before anything is loaded, beside what the loader then holds."""

from __future__ import annotations

import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from awq_files import build_awq
from decoder_tensors import kept, tensors_of
from fp8_files import build_fp8
from gptq_files import build_gptq
from hollow_checkpoints import INT4, LLAMA_7B, write_hollow
from late_device import LateDevice
from raw_safetensors import edit_tensors
from safetensors.torch import save_file
from tiny_checkpoints import build_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from motley.kernels.cpu.c_kernels.native_kernels import load_native_kernels
from motley.kernels.cpu.cpu_ops import CpuOps
from motley.kernels.device.device_context import gpu_context, interpreter_context
from motley.kernels.gpu.gpu_ops import GpuOps
from motley.kernels.launch.variant import Config, Variant
from motley.kernels.sampling.sample import PenaltyRows, SamplingRows, penalize_logits, sample
from motley.replicas.capacity import device_fit as module
from motley.replicas.capacity.device_fit import (
    FitResult,
    FitWorkload,
    TargetDevice,
    build_meta_decoder,
    find_table_devices,
    fit_model,
    local_cpu,
    local_gpu,
    memory_parts,
    store_value_blocks,
    table_devices,
)
from motley.replicas.checkpoint.files.json_fields import JsonFields
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.engine.startup import prefix_setup
from motley.replicas.engine.startup.engine_builder import build_engine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import InvalidRequest
from motley.replicas.execution.block_copies import StagedBlockCopy
from motley.replicas.execution.runner import ModelRunner
from motley.replicas.execution.step_plan import PlanItem, SampleSpec, StepPlan
from motley.replicas.execution.swapper import STAGING_BLOCKS, pinned_bytes
from motley.replicas.gpu.device_state import DeviceState
from motley.replicas.gpu.token_chooser import DeferredTensor, TokenChooser
from motley.replicas.kv.blocks import blocks_for
from motley.replicas.kv.memory_budget import HISTOGRAM_BYTES, SWAP_BYTES, activation_bytes, copied_rows, table_bytes
from motley.replicas.loading.model_loader import load_model
from motley.replicas.loading.operator_choice import choose_operators
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.model.decoder import Decoder
from motley.replicas.model.families.registry import read_config
from motley.replicas.model.rotary_embedding import RotaryTable
from motley.replicas.sampling_params import SamplingParams
from motley_bench.checkpoints.random_checkpoint import SHAPES, config_json, write_gptq

OUTLINES = Path(__file__).parents[1] / "support" / "meta_models_child.py"
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}
ASKED = FitWorkload(context=128, batch=1)
CLOSE = 0.05
MODES = (None, "int4", "int8", "both", "dense")


def beside(folder: Path, config: EngineConfig) -> tuple[int, int, Decoder]:
    """Return what the meta model says, what the loaded model holds, and that model."""
    checkpoint = inspect_checkpoint(folder)
    ops, _ = choose_operators(config, checkpoint.config.dtype)
    told = build_meta_decoder(checkpoint.config, checkpoint.format, checkpoint.tensors, ops)
    assert all(tensor.is_meta for tensor in tensors_of(told, set()))
    loaded = load_model(folder, choose_operators(config, checkpoint.config.dtype)[0])
    assert loaded.decoder.held == told.held
    assert loaded.weight_bytes == told.held.nbytes
    return told.held.nbytes, kept(loaded.decoder), loaded.decoder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_dense_checkpoints_keep_what_was_told(tmp_path: Path, stored: str, tied: bool) -> None:
    folder = build_checkpoint(tmp_path, "qwen2", dtype=stored, tie_word_embeddings=tied, **SHAPE)
    for dtype in ("float32", "bfloat16"):
        told, found, _ = beside(folder, EngineConfig(dtype=dtype))
        assert told == pytest.approx(found, rel=CLOSE), dtype


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("family", "flavour"),
    [
        ("qwen2", {"bits": 4, "group_size": 128}),
        ("llama", {"bits": 4, "group_size": 64, "desc_act": True, "tie_word_embeddings": True}),
        ("qwen3", {"bits": 8, "group_size": 128, "head_dim": 64}),
    ],
)
def test_quantized_checkpoints_keep_what_was_told(
    tmp_path: Path, family: str, flavour: dict[str, Any], mode: Any
) -> None:
    folder = build_gptq(tmp_path, family, **{**SHAPE, **flavour})
    for dtype in ("float32", "bfloat16"):
        told, found, decoder = beside(folder, EngineConfig(dtype=dtype, cpu_weights=mode))
        assert told == pytest.approx(found, rel=CLOSE), dtype
        dense = mode == "dense" or (mode is None and dtype == "float32")
        assert bool(decoder.held.metadata) is not dense


@pytest.mark.parametrize("mode", MODES)
def test_without_a_compiler_too(tmp_path: Path, mode: Any) -> None:
    """Groups so small that oneDNN's one scale for a row is not refused by the values."""
    checkpoint = inspect_checkpoint(build_gptq(tmp_path, "qwen2", bits=4, **SHAPE))
    made = []
    for load_it in (False, True):
        ops = CpuOps(torch.bfloat16, "fast", mode, None, "none wanted")
        if load_it:
            made.append(load_model(tmp_path, ops).decoder)
        else:
            made.append(build_meta_decoder(checkpoint.config, checkpoint.format, checkpoint.tensors, ops))
    chosen = [[part.kernel for linear in decoder.layers[0].linears for part in linear.parts] for decoder in made]
    if chosen[0] == chosen[1]:
        assert made[0].held.nbytes == pytest.approx(kept(made[1]), rel=CLOSE)
    else:  # a kernel that the values refused
        assert "onednn-int8" in "".join(chosen[0])


def test_a_tied_head_on_the_embedding_itself_is_counted_once(tmp_path: Path) -> None:
    """Torch's product in the dtype of the embedding needs no copy; the C kernels do."""
    folder = build_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True, **SHAPE)
    for native in (None, load_native_kernels()[0]):
        decoder = load_model(folder, CpuOps(torch.float32, "exact", None, native, "")).decoder
        assert decoder.held.nbytes == kept(decoder)
        assert bool(decoder.head.held.given) is (native is None)


@pytest.mark.parametrize("capability", [(6, 0), (6, 1), (7, 5), (8, 0)])
@pytest.mark.parametrize(
    "flavour", [{"bits": 4, "group_size": 128}, {"bits": 4, "desc_act": True}, {"bits": 8, "sym": True}, None]
)
def test_weights_as_a_gpu_holds_them(
    tmp_path: Path, capability: tuple[int, int], flavour: dict[str, Any] | None
) -> None:
    """Packed by the operators of that capability, in memory of this machine."""
    if flavour is None:
        folder = build_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True, **SHAPE)
    else:
        folder = build_gptq(tmp_path, "qwen2", **{**SHAPE, **flavour})
    rig = interpreter_context(capability)
    found = load_model(folder, GpuOps(rig)).decoder
    assert found.held.nbytes == kept(found)
    told = outlined_on(folder, GpuOps(replace(rig, device=torch.device("meta"))))
    assert told.nbytes == pytest.approx(kept(found), rel=CLOSE)


def test_no_outline_imports_the_compiler_of_torch(tmp_path: Path) -> None:
    """Which takes a second, in each process of a divided model; the operators of the meta device in Python do."""
    folders = [
        build_checkpoint(tmp_path / "dense", "qwen2", **SHAPE),
        build_gptq(tmp_path / "int4", "qwen2", bits=4, group_size=128, **SHAPE),
        build_gptq(tmp_path / "order", "llama", bits=4, group_size=64, desc_act=True, **SHAPE),
        build_gptq(tmp_path / "int8", "qwen3", bits=8, sym=False, **SHAPE),
        build_awq(tmp_path / "of awq", "llama", **SHAPE)[0],
        build_fp8(tmp_path / "blocks", "llama", scales="blocks", **SHAPE)[0],
        build_fp8(tmp_path / "rows", "llama", scales="rows", **SHAPE)[0],
    ]
    code = [sys.executable, str(OUTLINES), *map(str, folders)]
    done = subprocess.run(code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_layers_that_differ_are_looked_at_one_by_one(tmp_path: Path) -> None:
    folder = build_gptq(tmp_path, "llama", desc_act=True, **SHAPE)
    names = [f"model.layers.1.mlp.{name}_proj.g_idx" for name in ("gate", "up")]
    edit_tensors(folder / "model.safetensors", lambda tensors: [tensors.pop(name) for name in names])
    told, found, decoder = beside(folder, EngineConfig(dtype="bfloat16"))
    assert told == pytest.approx(found, rel=CLOSE)
    assert decoder.layers[0].held != decoder.layers[1].held


_GROWTH = """
import ctypes, gc, re, sys
from pathlib import Path
import torch
from motley.replicas.loading.operator_choice import choose_operators
from motley.replicas.engine_config import EngineConfig
from motley.replicas.loading.model_loader import load_model

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

torch.set_num_threads(1)
config = EngineConfig(dtype="bfloat16")
first = load_model(sys.argv[1], choose_operators(config, torch.bfloat16)[0])
before = resident()
model = load_model(sys.argv[2], choose_operators(config, torch.bfloat16)[0])
print(resident() - before, model.weight_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_grows_by_what_was_told(tmp_path: Path) -> None:
    shape = replace(SHAPES["tiny"], hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, vocab_size=8192)
    generator = torch.Generator().manual_seed(0)
    header = write_hollow(tmp_path / "large", {**config_json(shape), "tie_word_embeddings": False}, "BF16")
    tensors = {
        name: torch.empty(info.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        for name, (_, info) in inspect_checkpoint(header).tensors.items()
    }
    save_file(tensors, header / "model.safetensors", metadata={"format": "pt"})
    write_gptq(SHAPES["tiny"], tmp_path / "small")
    command = [sys.executable, "-c", _GROWTH, str(tmp_path / "small"), str(header)]
    grown, told = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert told > 100e6
    assert told == pytest.approx(grown, rel=CLOSE)


class _Alive(TorchDispatchMode):
    """The most bytes that operators have made and that lived at once, but for those that were there `before`."""

    def __init__(self, *before: torch.Tensor) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        place = storage.data_ptr()
        if not place or place in self._known:
            return
        self._known.add(place)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._drop, place, storage.nbytes())

    def _drop(self, place: int, nbytes: int) -> None:
        self._known.discard(place)
        self.now -= nbytes


@pytest.mark.skipif(load_native_kernels()[0] is None, reason="torch's operators write more")
@pytest.mark.parametrize(("family", "inner"), [("llama", 384), ("qwen3", 384), ("qwen2", 2048)])
def test_activations_are_at_most_what_was_told(tmp_path: Path, family: str, inner: int) -> None:
    folder = build_gptq(tmp_path, family, **{**SHAPE, "intermediate_size": inner})
    decoder = load_model(folder, choose_operators(EngineConfig(dtype="bfloat16"), torch.float32)[0]).decoder
    tokens = 128
    item = PlanItem(0, 0, tuple(range(tokens)), tuple(range(8)))
    kv = decoder.ops.allocate_kv(2, 8, *decoder.config.kv_shape)
    runner = ModelRunner(decoder, kv, torch.device("cpu"))
    runner.logits(StepPlan((item,)))  # tables of positions are made once
    with _Alive() as alive:
        runner.logits(StepPlan((item,)))
    told = activation_bytes(decoder.config, 2, tokens, tokens)
    assert alive.most <= told < 2 * alive.most


@pytest.mark.parametrize(("tokens", "running", "drafts"), [(40, 64, 0), (160, 8, 0), (64, 16, 1)])
def test_what_choosing_tokens_takes_on_a_device_is_at_most_what_was_told(
    monkeypatch: pytest.MonkeyPatch, tokens: int, running: int, drafts: int
) -> None:
    """The step is as it comes, with all that rows may request, and a prompt's log-probabilities. Kernels launch
    nothing, but take what they take.
    """
    monkeypatch.setattr(Variant, "launch", lambda *_: None)
    config = read_config(JsonFields(LLAMA_7B, "config.json"))
    asked = FitWorkload(128, 1, tokens, running, max_drafts=drafts)
    device, sampled = LateDevice(), asked.sampled
    state = DeviceState(device, running, 1, 0, config.vocab_size, torch.int16)
    state.keep_history()
    chooser = TokenChooser(device, _KernelsAlone(), state, sampled, penalties=not drafts)
    params = SamplingParams(
        top_k=5, top_p=0.9, logit_bias={3: 1.0}, logprobs=20, repetition_penalty=1.0 if drafts else 1.1, seed=0
    )
    spec = SampleSpec(params, 0, 0, 0, (), (1,), ())
    verified = (spec,) * drafts
    items = [PlanItem(i, 0, (1,) * (1 + drafts), (0,), spec, verified=verified) for i in range(sampled // (1 + drafts))]
    if rest := tokens - sampled:
        items.append(PlanItem(99, 0, (1,) * rest, (0,), prompt_targets=(2,) * rest, prompt_top=20))
    plan, logits = StepPlan(tuple(items)), DeferredTensor()
    device.mark().wait()
    with _Alive(state.history) as alive:
        device.submit(lambda: logits.put(torch.zeros(tokens, config.vocab_size)))
        chooser.choose(plan, {i: i for i in range(len(items))}, logits)()
    told = activation_bytes(config, 2, 0, tokens, copied_rows(sampled)) + sampled * HISTOGRAM_BYTES
    assert 0.8 * told < alive.most <= 1.01 * told, "what is asked for and told of each row is small"


class _KernelsAlone:
    """Samplers of a GPU; what they would have written is 0."""

    def sample(
        self, logits: torch.Tensor, rows: SamplingRows, filtered: bool, own: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config = Config.of(4, CHUNK=4096, TILE=1024)
        tokens, logprobs = sample(logits, rows, config, own=own, top_k=filtered, top_p=filtered)
        return tokens.zero_(), logprobs.zero_()

    def penalised(self, logits: torch.Tensor, history: torch.Tensor, rows: PenaltyRows) -> torch.Tensor:
        return penalize_logits(logits, history, rows, Config.of(4, CHUNK=4096, TILE=1024)).zero_()


@pytest.mark.parametrize(("longest", "running"), [(4096, 64), (5000, 3), (131_072, 64)])
def test_tables_of_positions_and_blocks_are_as_large_as_was_told(longest: int, running: int) -> None:
    config = read_config(JsonFields({**LLAMA_7B, "max_position_embeddings": longest}, "config.json"))
    with _Alive() as alive:
        rotary = RotaryTable(config.rope, config.rotary_dim, torch.device("cpu"))
        rotary.reserve(longest)
        state = DeviceState(LateDevice(), running, blocks_for(longest), 0, config.vocab_size, torch.int16)
    told = table_bytes(config, running)
    assert alive.now == pytest.approx(told, rel=0.01)
    assert len(state.tables) == 2 * running + 1


def test_steps_that_sample_more_rows_are_given_more_room(tmp_path: Path) -> None:
    """Three times its logits for a step of decodes alone, not twice."""
    checkpoint = inspect_checkpoint(write_hollow(tmp_path, LLAMA_7B))
    [place] = find_table_devices("Tesla P40")
    one, all_of_them = (fit_model(checkpoint, place, FitWorkload(128, 1, 512, running)).parts for running in (64, 512))
    assert one is not None
    assert all_of_them is not None
    more = 2 * (512 - 64) * (4 * 32_000) + (512 - 64) * HISTOGRAM_BYTES + 2 * (512 - 64) * 32_000 * 2  # histories too
    assert all_of_them.activations - one.activations >= more


def of(found: list[FitResult]) -> dict[str, FitResult]:
    return {each.place.name: each for each in found}


def test_an_int4_model_of_7b_on_all_gpus_of_the_table(tmp_path: Path) -> None:
    checkpoint = inspect_checkpoint(write_hollow(tmp_path, {**LLAMA_7B, "quantization_config": INT4}))
    asked = FitWorkload(context=3072, batch=1)
    found = of([fit_model(checkpoint, place, asked) for place in table_devices()])
    assert all(each.fits for each in found.values())
    [p4] = find_table_devices("Tesla P4")
    assert not fit_model(
        checkpoint, p4, FitWorkload(context=4096, batch=1)
    ).fits  # a layer written out in fp32 is in the way
    codes, tables = 6_476_005_376 / 2, 2 * 32_000 * 4096 * 2  # in layers; embedding and head in fp16
    for name, each in found.items():
        assert each.parts is not None
        lanes = "P40" in name or "P4" in name or "1080" in name
        dense = tables * 3 // 2 if lanes else tables  # a head in fp32
        assert each.parts.weights == pytest.approx(codes + dense, rel=0.01), name
        assert each.parts.metadata == pytest.approx(codes * 2 / 128 * 3, rel=0.01), name  # fp16 and a byte
        assert each.parts.kv_tokens(1000) == 2 * 32 * 4096 * 2 * 1000
        least = each.parts.loaded / each.place.device.bandwidth
        assert 0.9 * least < each.tpot_s < 2 * least, name
        assert each.ttft_s > 8 * each.tpot_s
    assert found["NVIDIA H100 80GB HBM3"].tpot_s < found["NVIDIA L4"].tpot_s < found["Tesla P4"].tpot_s
    assert found["Tesla P4"].batch == 1 < found["Tesla P40"].batch < found["NVIDIA H200"].batch
    assert "w4a16_gemv" in found["Tesla P40"].choices["layer, int4"]


def test_more_context_and_more_sequences_take_longer(tmp_path: Path) -> None:
    checkpoint = inspect_checkpoint(write_hollow(tmp_path, {**LLAMA_7B, "quantization_config": INT4}))
    [a100] = find_table_devices("NVIDIA A100-SXM4-80GB")
    short, long, many = (
        fit_model(checkpoint, a100, FitWorkload(*asked)) for asked in ((512, 1), (4096, 1), (4096, 16))
    )
    assert short.ttft_s < long.ttft_s == many.ttft_s
    assert short.tpot_s < long.tpot_s < many.tpot_s < 16 * long.tpot_s
    assert many.context == 4096
    assert long.kv_tokens == many.kv_tokens


def test_a_dense_model_that_is_too_large_is_told_what_would_fit(tmp_path: Path) -> None:
    checkpoint = inspect_checkpoint(write_hollow(tmp_path, LLAMA_7B))
    [t4], [p40], [turing], [l4] = map(find_table_devices, ("Tesla T4", "Tesla P40", "GeForce RTX 2080 Ti", "NVIDIA L4"))
    told = fit_model(checkpoint, turing, FitWorkload(4096, 1))
    assert (told.fits, told.ttft_s, told.tpot_s, told.kv_tokens) == (False, None, None, 0)
    missing, quantized, divided, on_disk = told.advice.split("; ")
    assert missing.endswith("GiB are missing")
    assert 3.0 < float(missing.split()[0]) < 5.0
    assert quantized.startswith("as GPTQ int4 in groups of 128 the model would take 3.6 GiB and leave room for ")
    assert divided.startswith("divided among 2 or more such devices it could fit: --pipeline-parallel 2 (or --tensor-")
    assert divided.endswith("tells what each would hold")
    assert on_disk.startswith("with --weights-memory SIZE layers beyond it would come from the host's memory")
    pascal = fit_model(checkpoint, p40, FitWorkload(4096, 1))
    assert pascal.parts.weights == pytest.approx(4 * 6.738e9, rel=0.05), "6.1 computes in fp32, and keeps weights so"
    assert "GiB are missing" in pascal.advice
    assert fit_model(checkpoint, l4, FitWorkload(4096, 1)).fits
    small = fit_model(checkpoint, t4, FitWorkload(4096, 1))
    shorter, quantized = small.advice.split("; ")
    assert 1300 < small.kv_tokens < 1600
    assert shorter == f"1 of up to {small.kv_tokens} tokens fit"
    assert "leave room for" in quantized
    fewer = fit_model(checkpoint, t4, FitWorkload(4096, 500)).advice
    assert fewer.startswith(f"fewer sequences fit: one alone has room for {small.kv_tokens} tokens; as GPTQ int4")


def test_a_quantized_model_is_not_told_to_be_quantized(tmp_path: Path) -> None:
    large = {**LLAMA_7B, "num_hidden_layers": 320, "quantization_config": INT4}
    told = fit_model(
        inspect_checkpoint(write_hollow(tmp_path, large)), find_table_devices("Tesla T4")[0], FitWorkload(128, 1)
    ).advice
    assert "GPTQ" not in told
    assert "divided among 3 or more such devices" in told


def test_a_cpu_that_is_too_small_is_told_of_its_disk(tmp_path: Path) -> None:
    """And with the option it is told, the same model fits."""
    checkpoint = inspect_checkpoint(write_hollow(tmp_path, {**LLAMA_7B, "quantization_config": INT4}))
    config = EngineConfig(dtype="bfloat16", cpu_weights="dense")
    ops = lambda: choose_operators(config, torch.float16)[0]  # noqa: E731
    small = TargetDevice("cpu", ops, 4 << 30, 4 << 30)
    told = fit_model(checkpoint, small, FitWorkload(128, 1))
    assert not told.fits
    assert told.advice.endswith("with --weights-memory SIZE what is beyond it would be read from disk in every step")
    assert "devices" not in told.advice
    assert fit_model(checkpoint, small, FitWorkload(128, 1, weights_memory_bytes=2 << 30)).fits


def test_weights_written_out_for_many_tokens_are_counted(tmp_path: Path) -> None:
    """In half precision for cuBLAS: int4 everywhere, int8 where that is faster than dp4a."""
    [t4], [p40] = find_table_devices("Tesla T4"), find_table_devices("Tesla P40")
    beside = {}
    for bits in (4, 8):
        quantized = {**LLAMA_7B, "quantization_config": {**INT4, "bits": bits}}
        checkpoint = inspect_checkpoint(write_hollow(tmp_path / str(bits), quantized))
        beside[bits] = [fit_model(checkpoint, place, ASKED).parts.activations for place in (t4, p40)]
    gate_up = 2 * 11_008 * 4096
    assert beside[4][0] > 2 * gate_up
    assert beside[4][1] - beside[4][0] == 2 * gate_up  # 6.1 computes in fp32
    assert beside[8][0] - beside[8][1] == 2 * gate_up


def test_what_has_no_kernel_is_counted_as_written_out(tmp_path: Path) -> None:
    eight = inspect_checkpoint(build_gptq(tmp_path / "eight", "llama", bits=8, **SHAPE))
    [p100], [p40] = find_table_devices("Tesla P100-PCIE-12GB"), find_table_devices("Tesla P40")
    there, here = fit_model(eight, p100, ASKED), fit_model(eight, p40, ASKED)
    assert there.parts.metadata == 0 < here.parts.metadata
    assert there.choices["layer, int8"].startswith("written out: int8: compute capability 6.0 does not use it")
    assert here.choices["layer, int8"] == "w8a8"
    odd = inspect_checkpoint(build_gptq(tmp_path / "odd", "llama", head_dim=32, **SHAPE))
    refused = fit_model(odd, p40, ASKED)
    assert (refused.parts, refused.fits) == (None, False)
    assert refused.refused.startswith("head_dim: 32 has no kernel")


def test_a_cpu_has_room_by_what_is_free_and_no_times(tmp_path: Path) -> None:
    checkpoint = inspect_checkpoint(build_gptq(tmp_path, "qwen2", **SHAPE))
    place = local_cpu(lambda: choose_operators(EngineConfig(), torch.float32)[0])
    found = fit_model(checkpoint, place, ASKED)
    assert found.fits
    assert (found.ttft_s, found.tpot_s, found.parts.graphs, found.parts.context) == (None, None, 0, 0)
    assert found.kv_tokens == (place.free - found.parts.loaded) // 4 // found.parts.kv_block * 16
    assert "headers cannot show" in found.choices["values"]
    small = fit_model(checkpoint, replace(place, free=found.parts.loaded - 1), ASKED)
    assert small.advice.startswith("0.0 GiB are missing")


def test_kv_in_int8_has_room_for_more_and_is_read_sooner(tmp_path: Path) -> None:
    checkpoint = inspect_checkpoint(write_hollow(tmp_path, {**LLAMA_7B, "quantization_config": INT4}))
    asked = FitWorkload(context=4096, batch=16)
    half, eight = (
        fit_model(checkpoint, find_table_devices("NVIDIA A100-SXM4-80GB", kv)[0], asked) for kv in (None, "int8")
    )
    assert half.parts.kv_tokens(1000) == 2 * 32 * 4096 * 2 * 1000
    assert eight.parts.kv_tokens(1000) == 2 * 32 * 32 * (128 + 4) * 1000, "a scale in fp32 for each vector"
    assert eight.parts.loaded == half.parts.loaded
    assert eight.kv_tokens > 1.9 * half.kv_tokens
    spared = 16 * 4096 * (half.parts.kv_tokens(1000) - eight.parts.kv_tokens(1000)) / 1000
    assert half.tpot_s - eight.tpot_s == pytest.approx(spared / half.place.device.bandwidth, rel=0.1)
    blocks = {fit_model(checkpoint, place, ASKED).parts.kv_block for place in table_devices("int8")}
    assert blocks == {eight.parts.kv_block}
    here = fit_model(
        checkpoint, local_cpu(lambda: choose_operators(EngineConfig(kv_dtype="int8"), torch.float32)[0]), ASKED
    )
    assert here.parts.kv_block == eight.parts.kv_block


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_what_swapping_takes_is_what_the_engine_takes(tmp_path: Path, kv_dtype: Any) -> None:
    """On the device's stand-in: its staging, its blocks of KV, and what is pinned of the host's memory."""
    folder = build_gptq(tmp_path, "qwen3", **{**SHAPE, "head_dim": 64})
    ops = GpuOps(interpreter_context((8, 0)), kv_dtype)
    asked = FitWorkload(context=128, batch=1, max_running=4, swap_memory_bytes=2**20)
    told = fit_model(inspect_checkpoint(folder), find_table_devices("8.0", kv_dtype)[0], asked).parts
    settings: dict[str, Any] = {"max_running": 4, "swap_memory_bytes": 2**20, "kv_memory_bytes": 2**22}
    engine = Engine(folder, dtype="float16", threads=1, ops=ops, accelerator=LateDevice(recorded=False), **settings)
    runner = engine._built.runner
    assert runner.swapper is not None
    assert sum(cache.nbytes for cache in runner.kv) == told.kv_block * (engine._built.profile.kv_blocks_total + 1)
    assert isinstance(runner.swapper._moves, StagedBlockCopy)
    assert runner.swapper._moves._staged.nbytes == told.staging
    [slab] = runner.swapper._slabs
    assert told.host == 2 ** (slab.nbytes - 1).bit_length(), "pinned memory comes in powers of two"


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_what_prefixes_take_is_what_the_engine_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: Any
) -> None:
    """Covers a CPU's memory, and a host's, pinned."""
    for each in (module, prefix_setup):
        monkeypatch.setattr(each, "free_memory", lambda: 2**32)
    checkpoint = inspect_checkpoint(build_gptq(tmp_path, "qwen3", **{**SHAPE, "head_dim": 64}))
    asked = replace(ASKED, shares=True, swap_memory_bytes=0)
    config = EngineConfig(threads=1, kv_dtype=kv_dtype, kv_memory_bytes=2**22, prefix_cache="memory")
    built = build_engine(tmp_path, config)
    here = fit_model(checkpoint, local_cpu(lambda: choose_operators(config, checkpoint.config.dtype)[0]), asked).parts
    assert built.core.scheduler.prefixes.pool.total * here.kv_block == here.buffers > 0.9 * 2**28
    built.close()
    a100 = find_table_devices("8.0", kv_dtype)[0]
    told = fit_model(checkpoint, a100, asked).parts
    assert (told.host, told.staging) == (0, STAGING_BLOCKS * told.kv_block)
    assert told.buffers == pinned_bytes(2**30 // told.kv_block, told.kv_block)
    monkeypatch.setattr(module, "free_memory", lambda: 2**20)
    least = fit_model(checkpoint, replace(a100, at_hand=True), asked).parts
    assert least.buffers == pinned_bytes(2 * store_value_blocks(checkpoint.config, a100.ops()), told.kv_block)
    assert fit_model(checkpoint, a100, replace(asked, shares=False)).parts.buffers == 0


def test_how_much_of_the_host_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for, the default, or none; never more than all that runs could fill; of a CPU's none."""
    checkpoint = inspect_checkpoint(build_gptq(tmp_path, "qwen2", **{**SHAPE, "head_dim": 64}))
    a100 = find_table_devices("8.0")[0]

    def of_host(swap: int | None, place: TargetDevice = a100, running: int = 64) -> tuple[int, int]:
        """Blocks that are staged on the device, and bytes of the host."""
        parts = fit_model(checkpoint, place, replace(ASKED, swap_memory_bytes=swap, max_running=running)).parts
        return parts.staging // parts.kv_block, parts.host

    block = fit_model(checkpoint, a100, ASKED).parts.kv_block
    per_sequence = blocks_for(checkpoint.config.max_model_len) * block
    assert of_host(0) == (0, 0)
    assert of_host(3 * block) == (STAGING_BLOCKS, 2 ** (3 * block - 1).bit_length())
    assert 64 * per_sequence < SWAP_BYTES
    assert 64 * per_sequence <= of_host(None)[1] < 2 * 64 * per_sequence
    assert 8 * per_sequence <= of_host(None, running=8)[1] < 2 * 8 * per_sequence
    monkeypatch.setattr(module, "free_memory", lambda: 40 * block)
    assert of_host(None, replace(a100, at_hand=True)) == (STAGING_BLOCKS, 2 ** (10 * block - 1).bit_length())
    assert of_host(None, local_cpu(lambda: choose_operators(EngineConfig(), torch.float32)[0])) == (0, 0)
    assert pinned_bytes(3, 2**25) == 2**26 + 2**25
    assert pinned_bytes(0, 5) == 0
    assert pinned_bytes(2, 2**26 + 1) == 2 * 2**27


def test_unknown_devices_are_told_the_known_ones() -> None:
    assert [place.name for place in find_table_devices("6.1")] == [
        "Tesla P40",
        "Tesla P4",
        "NVIDIA GeForce GTX 1080 Ti",
    ]
    with pytest.raises(InvalidRequest, match=r"device: '5\.2' is not in the table; .*6\.0, 6\.1.*Tesla T4") as told:
        find_table_devices("5.2")
    assert told.value.param == "device"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("flavour", [{"bits": 4, "group_size": 128}, {"bits": 8}, None])
def test_a_gpu_at_hand_keeps_what_was_told(tmp_path: Path, flavour: dict[str, Any] | None) -> None:
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "head_dim": 128}
    if flavour is None:
        folder = build_checkpoint(tmp_path, "qwen3", dtype="bfloat16", **shape)
    else:
        folder = build_gptq(tmp_path, "qwen3", **{**shape, **flavour})
    place = local_gpu(torch.device("cuda:0"))
    told = fit_model(inspect_checkpoint(folder), place, ASKED)
    before = torch.cuda.memory_allocated()
    loaded = load_model(folder, GpuOps(gpu_context(torch.device("cuda:0"))))
    torch.cuda.synchronize()
    assert told.parts.loaded == pytest.approx(torch.cuda.memory_allocated() - before, rel=CLOSE)
    assert loaded.decoder.held == outlined_on(folder, place.ops())


def outlined_on(folder: Path, ops: Any) -> Any:
    checkpoint = inspect_checkpoint(folder)
    decoder = build_meta_decoder(checkpoint.config, checkpoint.format, checkpoint.tensors, ops)
    assert memory_parts(decoder, ASKED).loaded == decoder.held.nbytes
    return decoder.held


def test_histories_are_for_penalties_on_the_device_and_drafts_have_none(tmp_path: Path) -> None:
    checkpoint = inspect_checkpoint(write_hollow(tmp_path, LLAMA_7B))
    [place] = find_table_devices("Tesla P40")
    few, many = (fit_model(checkpoint, place, FitWorkload(128, 1, max_running=running)).parts for running in (8, 9))
    assert few is not None
    assert many is not None
    # Each has two rows of history and of blocks, and its histograms; a prompt's logits are copied in any case.
    assert many.activations - few.activations == 2 * (32_000 * 2 + 256 * 4) + HISTOGRAM_BYTES
    drafting = fit_model(checkpoint, place, FitWorkload(128, 1, max_running=8, max_drafts=1)).parts
    assert drafting is not None
    assert drafting.activations - few.activations == -17 * 32_000 * 2 + 8 * HISTOGRAM_BYTES
