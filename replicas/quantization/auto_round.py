"""Checkpoints that auto-round writes under its own name: the layout of GPTQ, AWQ or FP8, as `packing_format` says."""

from __future__ import annotations

from collections.abc import Collection

from ..checkpoint.files.json_fields import JsonFields
from ..checkpoint.files.unsupported_formats import USE_ORIGINAL_MODEL, explain_packing
from .awq import AWQ
from .fp8 import FP8
from .gptq import GPTQ
from .weight_format import WeightFormat

_LAYOUTS = ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:fp8")


def read_auto_round(config: JsonFields, names: Collection[str] = ()) -> WeightFormat:
    """Return the format from the `quantization_config` of config.json. Raises CheckpointError naming a key that is not
    supported, and what the file is.
    """
    if (error := explain_packing(config)) is not None:
        raise error
    if config.says("packing_format") and config.raw["packing_format"] not in _LAYOUTS:
        raise config.error(
            "packing_format", f"{', '.join(_LAYOUTS)}, since others are not read here; {USE_ORIGINAL_MODEL}"
        )
    layout = config.choice("packing_format", _LAYOUTS)
    inner = JsonFields({k: v for k, v in config.raw.items() if k != "packing_format"}, config.file, config.prefix)
    if layout == "auto_round:auto_gptq":
        return GPTQ.read(inner, names)
    return AWQ.read(inner, names) if layout == "auto_round:auto_awq" else FP8.read(inner, names)
