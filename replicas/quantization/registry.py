"""Which format a checkpoint is in. A new format is a new file and a line here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..config import ModelConfig
from ..folder import is_there
from ..json_file import Fields, read_json
from .awq import AWQ
from .base import Format
from .dense import Dense
from .fp8 import FP8
from .gptq import GPTQ

READERS: dict[str, Callable[[Fields], Format]] = {
    "awq": AWQ.read,
    "fp8": FP8.read,
    "gptq": GPTQ.read,
}
AUTOGPTQ_CONFIG = "quantize_config.json"  # how AutoGPTQ said it before config.json did


def read_format(config: Fields, folder: Path, model: ModelConfig) -> Format:
    """The format of a checkpoint's linears. Raises CheckpointError naming what is not supported."""
    section = config.section("quantization_config")
    if section is not None:
        return READERS[section.choice("quant_method", tuple(READERS))](section)
    if is_there(folder, AUTOGPTQ_CONFIG):
        return GPTQ.read(Fields(read_json(folder, AUTOGPTQ_CONFIG), AUTOGPTQ_CONFIG))
    return Dense(name=str(model.dtype).removeprefix("torch."))
