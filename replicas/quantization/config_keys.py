"""Check of the keys of a quantization config that a reader does not read.

A reader names the keys that it reads. Of all others, those in WRITERS, by the libraries that write them, say how a file
was made and do not affect what the tensors mean. Keys whose name says that they tell where a file comes from are
accepted with a line in the log. Any other key may change what the numbers mean, so it is refused by name, unless its
value says nothing (null, false, empty).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

from ..checkpoint.files.json_fields import JsonFields

log = logging.getLogger(__name__)

WRITERS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "AutoGPTQ and optimum": frozenset(
            {
                *("damp_percent", "static_groups", "true_sequential", "dataset", "tokenizer", "model_name_or_path"),
                *("model_file_base_name", "model_seqlen", "batch_size", "block_name_to_quantize", "pad_token_id"),
                *("module_name_preceding_first_block", "use_cuda_fp16", "use_exllama", "exllama_config"),
                *("disable_exllama", "max_input_length", "cache_block_outputs", "cache_examples_on_gpu"),
                *("module_name_preceding_first_block", "inside_layer_modules", "awq_gemm_checkpoint"),
            }
        ),
        "GPTQModel": frozenset(
            {
                *("meta", "damp_auto_increment", "mse", "act_group_aware", "failsafe", "fallback", "hyb_act"),
                *("offload_to_disk", "offload_to_disk_path", "v2", "v2_alpha", "v2_memory_device", "gptaq", "foem"),
                *("pack_impl", "parallel_packing", "compute_device_filter", "auto_forward_data_parallel", "hessian"),
                *("vram_strategy", "gc_mode", "wait_for_submodule_finalizers", "activation_weighted_mse"),
            }
        ),
        "AutoAWQ": frozenset(
            {
                *("do_fuse", "modules_to_fuse", "fuse_max_seq_len", "calib_data", "duo_scaling", "apply_clip"),
                *("n_parallel_calib_samples", "max_calib_samples", "max_calib_seq_len"),
            }
        ),
        "auto-round": frozenset(
            {
                *("autoround_version", "provider", "iters", "nsamples", "seqlen", "lr", "minmax_lr", "amp"),
                *("enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "low_gpu_mem_usage"),
                *("gradient_accumulate_steps", "scale_dtype", "to_quant_block_names", "quant_block_list"),
                *("supported_types", "low_cpu_mem_usage", "not_use_best_mse", "dynamic_max_gap", "use_quant_input"),
                *("enable_torch_compile", "enable_alg_ext", "enable_adam", "disable_opt_rtn", "act_group_size"),
                *("static_attention_granularity", "static_kv_granularity", "train_bs", "n_samples", "sampler"),
            }
        ),
        "compressed-tensors and llm-compressor": frozenset(
            {"version", "global_compression_ratio", "quantization_status", "observer", "observer_kwargs"}
        ),
        # Keys on experts, which no family here has, on how transformers is to load the model, and with which kernels.
        "transformers": frozenset(
            {
                *("expert_dtype", "dequantize", "run_compressed", "backend", "use_optimized_inference", "device_map"),
                *("inject_fused_attention", "inject_fused_mlp", "producer"),
            }
        ),
    }
)
_IGNORED_KEYS = frozenset().union(*WRITERS.values())
# Last words of keys that say where a file comes from, who made it and how long that took.
_ORIGIN = re.compile(
    r"(^|_)(version|provider|author|tool|url|uri|license|comment|notes?|description|date|time|timestamp|seconds|"
    r"duration|seed|nsamples|samples|seqlen|iters|epochs|lr|path|dir|hostname|verbose)$"
)


def is_ignored_key(key: str) -> bool:
    """Return whether a writer's key is known not to affect what tensors mean."""
    return key in _IGNORED_KEYS


def check_config_keys(config: JsonFields, read: Collection[str]) -> None:
    """Raise CheckpointError naming a key that is not in `read`, the keys that the caller reads, and may change what
    tensors mean.
    """
    for key in config.raw:
        if key in read or key in _IGNORED_KEYS or not config.says(key):
            continue
        if not _ORIGIN.search(key):
            raise config.error(key, "this key to be absent, since it is not understood here")
        log.info(
            "%s: the field %s is unknown; it is taken for a note on where the file comes from",
            config.file,
            config.prefix + key,
        )
