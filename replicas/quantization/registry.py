"""Registry of checkpoint formats. A new format is a new file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

import torch

from ..checkpoint.files.checkpoint_folder import has_entry
from ..checkpoint.files.json_fields import MAX_CONFIG_BYTES, JsonFields, read_json
from ..checkpoint.files.unsupported_formats import explain_method
from ..errors import CheckpointError
from ..short_repr import short_repr
from .auto_round import read_auto_round
from .awq import AWQ
from .compressed_tensors import read_compressed
from .dense import Dense
from .fp8 import FP8
from .gptq import GPTQ
from .weight_format import WeightFormat

FormatReader = Callable[[JsonFields, Collection[str]], WeightFormat]
READERS: dict[str, FormatReader] = {
    "auto-round": read_auto_round,
    "awq": AWQ.read,
    "compressed-tensors": read_compressed,
    "fp8": FP8.read,
    "gptq": GPTQ.read,
}
CONFIG_SECTIONS = ("quantization_config", "compression_config")  # the second in older files of compressed-tensors
# Separate files that AutoGPTQ and AutoAWQ wrote before config.json had the section, and still write beside it.
OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
# Keys in which such a file and config.json must agree: others do not matter, or are in only one of them.
_ALIKE = ("quant_method", "bits", "group_size", "sym", "zero_point", "checkpoint_format", "version")


class StoredModel(Protocol):
    """Facts of a model's configuration that a format needs."""

    @property
    def dtype(self) -> torch.dtype: ...


def read_format(config: JsonFields, folder: Path, model: StoredModel, names: Collection[str] = ()) -> WeightFormat:
    """Return the format of a checkpoint's linears; `names` are the names of its tensors.

    Raises CheckpointError naming what is not supported, and both of two places that differ.
    """
    found = [section for key in CONFIG_SECTIONS if (section := config.section(key)) is not None and section.raw]
    own = {
        method: JsonFields(read_json(folder, file, MAX_CONFIG_BYTES), file)
        for file, method in OWN_FILES.items()
        if has_entry(folder, file)
    }
    if not found and not own:
        return Dense(name=str(model.dtype).removeprefix("torch."))
    if not found:
        (method, section), *others = own.items()
        _check_alike(section, [other for _, other in others])
        return _reader(section, method)(section, names)
    section = found[0]
    if (error := explain_method(section)) is not None:
        raise error
    _check_alike(section, [*found[1:], *own.values()])
    return _reader(section)(section, names)


def _reader(section: JsonFields, method: str | None = None) -> FormatReader:
    """Return the reader by `quant_method`, else by `method`, as newer files of GPTQModel call it, else the given
    `method`'s.
    """
    key = "method" if "method" in section and "quant_method" not in section else "quant_method"
    return READERS[section.choice(key, tuple(READERS), default=method)]


def _check_alike(section: JsonFields, others: list[JsonFields]) -> None:
    for other in others:
        for key in _ALIKE:
            one, two = section.raw.get(key), other.raw.get(key)
            if one is not None and two is not None and str(one).lower() != str(two).lower():
                where = f"{section.prefix}{key} in {section.file}"
                raise CheckpointError(
                    f"{short_repr(two)}, but {where} is {short_repr(one)}: remove the one that is wrong",
                    file=other.file,
                    tensor=other.prefix + key,
                )
