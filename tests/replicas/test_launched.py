"""Models that the loader makes of usual checkpoints launch nothing that the matrix has not compiled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hollow_checkpoints import INT4, write_hollow

from motley.kernels.device.compute_capability import CAPABILITIES
from motley.kernels.device.device_context import DeviceContext
from motley.kernels.device.device_table import DEVICES
from motley.kernels.device.precision import policy_of
from motley.kernels.gpu.gpu_ops import GpuOps
from motley.kernels.launch.model_shapes import MODELS
from motley.kernels.launch.variant import Variant
from motley.kernels.registry import OPERATIONS
from motley.kernels.tuning.compile_matrix import select_jobs
from motley.replicas.capacity.device_fit import build_meta_decoder
from motley.replicas.model.checkpoint_inspection import Checkpoint, inspect_checkpoint

INT8 = {**INT4, "bits": 8}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FAMILIES = {"qwen2.5-0.5b": "qwen2", "qwen2.5-7b": "qwen2", "llama-3-8b": "llama", "qwen3-32b": "qwen3"}
# Of a decode, with every number of tokens that a kernel may be made for, and of a prefill.
TOKENS = (*range(1, 65), 65, 72, 96, 100, 128, 129, 160, 192, 200, 256, 257, 512, 1000, 2048, 8192)

Kernel = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Launched:
    model: str
    layer: str
    tokens: int
    kernel: str


def described(name: str) -> dict[str, Any]:
    """config.json, but of one layer: all are alike."""
    size, family = next(model for model in MODELS if model.name == name), FAMILIES[name]
    return {
        "architectures": [f"{family.capitalize()}ForCausalLM"], "model_type": family, "vocab_size": size.vocabulary,
        "hidden_size": size.hidden, "intermediate_size": size.intermediate, "num_hidden_layers": 1,
        "num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads, "head_dim": size.head_dim,
        "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
    }  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Checkpoint]]:
    """Return each model as GPTQ in 4 and 8 bits and as AWQ writes it, with scales in fp16."""
    found: dict[str, list[Checkpoint]] = {}
    for name in FAMILIES:
        for index, kind in enumerate((INT4, AWQ, INT8)):
            folder: Path = tmp_path_factory.mktemp(name) / str(index)
            written = write_hollow(folder, {**described(name), "quantization_config": kind})
            found.setdefault(name, []).append(inspect_checkpoint(written))
    return found


def kernel(variant: Variant) -> Kernel:
    """Types and constants together; inline PTX aside, which a launch on a tensor of no device does without."""
    constants = {name: value for name, value in variant.all_constants.items() if name != "PTX"}
    config = variant.config.num_warps, variant.config.num_stages
    return variant.name, variant.types, tuple(sorted(constants.items())), config, variant.aligned


EACH_TIME = ((6, 1), (7, 5), (9, 0))


@cache
def compiled(version: tuple[int, int]) -> frozenset[Kernel]:
    jobs = [job for each in OPERATIONS for job in select_jobs(each, version)]
    return frozenset(kernel(launch.variant) for job in jobs for launch in job.launches())


@pytest.mark.slow("The layers of twelve checkpoints are launched for 79 numbers of tokens")
@pytest.mark.parametrize(
    "version",
    [*EACH_TIME, *(pytest.param(one, marks=pytest.mark.thorough) for one in CAPABILITIES if one not in EACH_TIME)],
    ids="{0[0]}.{0[1]}".format,
)
def test_whatever_usual_checkpoints_launch_the_matrix_compiles(
    version: tuple[int, int], checkpoints: dict[str, list[Checkpoint]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each launch, its types and constants together, of every layer and of all numbers of tokens."""
    launched: list[Variant] = []
    monkeypatch.setattr(Variant, "launch", lambda self, grid, *arguments: launched.append(self))
    about = next(device for device in DEVICES if device.capability.version == version)
    ops = GpuOps(DeviceContext(torch.device("meta"), policy_of(*version), about))
    kernels: set[str] = set()
    missing: dict[Kernel, Launched] = {}
    for name, each in checkpoints.items():
        for checkpoint in each:
            decoder = build_meta_decoder(checkpoint.config, checkpoint.format, checkpoint.tensors, ops)
            layers = zip(("qkv", "o", "gate_up", "down"), decoder.layers[0].linears, strict=True)
            for layer, linear in layers:
                columns = dict(next(model for model in MODELS if model.name == name).linears)[layer][1]
                for tokens in TOKENS:
                    launched.clear()
                    linear(torch.empty((tokens, columns), dtype=ops.dtype, device="meta"))
                    kernels |= {variant.name for variant in launched}
                    for variant in launched:
                        if kernel(variant) not in compiled(version):
                            missing.setdefault(kernel(variant), Launched(name, layer, tokens, variant.name))
    assert {"w4a16_gemm" if policy_of(*version).capability.bf16 else "w4a16_gemv", "w4a16_dequantize"} <= kernels
    assert not missing, (len(missing), list(missing.values())[:8])
