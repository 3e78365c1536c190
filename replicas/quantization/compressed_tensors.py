"""FP8 checkpoints as compressed-tensors writes them, the library behind llm-compressor ("FP8_DYNAMIC", "FP8_BLOCK").

`quantization_config.config_groups` says how layers are held, and `ignore` which are not. Supported is `format`
"float-quantized" with weights of 8 bits and one scale for each output ("channel"), for all ("tensor") or for each block
of 128 x 128 ("block"), and with activations that are rounded as they are computed ("dynamic"): the tensors of the FP8
format, with scales that are always called weight_scale. Other formats are refused by name.
"""

from __future__ import annotations

from collections.abc import Collection

from ...kernels.canonical_weights import FP8_BLOCK
from ..checkpoint.files.json_fields import JsonFields
from ..checkpoint.files.unsupported_formats import USE_ORIGINAL_MODEL
from .config_keys import check_config_keys
from .fp8 import FP8
from .weight_format import find_unquantized

SCALE = "weight_scale"
_FORMATS = ("float-quantized", "naive-quantized")
_READ = frozenset(
    {
        *("quant_method", "format", "config_groups", "ignore", "kv_cache_scheme", "sparsity_config"),
        *("quantization_status", "transform_config", "moe_sparsity_config"),
    }
)
_OF_GROUP = frozenset({"format", "targets", "weights", "input_activations", "output_activations"})
_OF_TENSORS = frozenset(
    {"dynamic", "group_size", "num_bits", "strategy", "symmetric", "type", "block_structure", "actorder"}
)


def read_compressed(config: JsonFields, names: Collection[str] = ()) -> FP8:
    """Return the format from the `quantization_config` of config.json.

    names  names of the checkpoint's tensors, which show which layers of `ignore` are unquantized, since it may name
           them by regular expressions

    Raises CheckpointError naming a key that asks for what is not supported or not understood.
    """
    check_config_keys(config, _READ)
    if config.raw.get("format") not in (None, *_FORMATS):
        raise config.error("format", f"{' or '.join(_FORMATS)}, since others are not read here; {USE_ORIGINAL_MODEL}")
    config.choice("quantization_status", ("compressed", "frozen"), default="compressed")
    for key in ("kv_cache_scheme", "transform_config", "moe_sparsity_config"):
        if config.says(key):
            raise config.error(key, "this key to be absent: it is not supported")
    sparsity = config.section("sparsity_config")
    if sparsity is not None and sparsity.raw:
        sparsity.choice("format", ("dense",))  # older files have this for weights that are not sparse
    strategies = {_strategy(config, group) for group in _groups(config)}
    if len(strategies) > 1:
        raise config.error("config_groups", "groups that hold their weights alike")
    ignored = config.strings("ignore")
    modules = ("",) if any(name.startswith("re:") for name in ignored) else ignored
    return FP8(strategies == {"block"}, find_unquantized(names, modules, SCALE), SCALE)


def _groups(config: JsonFields) -> list[str]:
    groups = config.section("config_groups")
    if groups is None or not groups.raw:
        raise config.error("config_groups", "an object with a group of layers")
    return list(groups.raw)


def _strategy(config: JsonFields, name: str) -> str:
    """Return the strategy of a group's weights, after checking that everything else the group says is supported."""
    groups = config.section("config_groups")
    group = groups.section(name) if groups is not None else None
    weights = group.section("weights") if group is not None else None
    if group is None or weights is None:
        raise config.error("config_groups", f"a group {name} with weights")
    check_config_keys(group, _OF_GROUP)
    group.choice("format", _FORMATS, default=_FORMATS[0])
    if group.says("output_activations"):
        raise group.error("output_activations", "null: outputs are left as they are")
    strategy = weights.choice("strategy", ("channel", "tensor", "block"))
    _check_tensors(weights, dynamic=False)
    if strategy == "block" and weights.integers("block_structure", 1, 1 << 20) != (FP8_BLOCK, FP8_BLOCK):
        raise weights.error("block_structure", f"[{FP8_BLOCK}, {FP8_BLOCK}]")
    activations = group.section("input_activations")
    if activations is None:
        raise group.error("input_activations", "activations of 8 bits that are rounded when they come")
    _check_tensors(activations, dynamic=True)
    activations.choice("strategy", ("token", "tensor", "group"), default="token")
    return strategy


def _check_tensors(args: JsonFields, *, dynamic: bool) -> None:
    check_config_keys(args, _OF_TENSORS)
    args.choice("type", ("float",))
    if args.integer("num_bits", 1, 64) != 8:
        raise args.error("num_bits", "8")
    if not args.boolean("symmetric", True):
        raise args.error("symmetric", "true")
    if args.boolean("dynamic", False) is not dynamic:
        raise args.error("dynamic", "true: scales of activations are found when they come" if dynamic else "false")
    if args.says("actorder"):
        raise args.error("actorder", "null")
