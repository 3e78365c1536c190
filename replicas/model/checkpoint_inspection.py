"""Checkpoint on disk: finds its files, and checks them as far as possible without reading a tensor."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from ..checkpoint.files.checkpoint_folder import has_entry, resolve_within
from ..checkpoint.files.json_fields import MAX_CONFIG_BYTES, JsonFields, read_json
from ..checkpoint.files.model_hub import resolve_model
from ..checkpoint.files.safetensors_header import TensorInfo, read_header
from ..checkpoint.files.unsupported_formats import refuse_unsupported_config, refuse_unsupported_files
from ..errors import CheckpointError
from ..quantization.registry import read_format
from ..quantization.weight_format import FLOAT_DTYPES, WeightFormat
from .families.registry import read_config
from .generation_config import GenerationDefaults, read_generation_config
from .model_config import ModelConfig
from .tensor_layout import EMBEDDING, HEAD, check_tensors, decoder_layout

__all__ = ["Checkpoint", "inspect_checkpoint", "resolve_model"]

log = logging.getLogger(__name__)

CONFIG = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20  # an index of 100,000 tensors is below 10 MB
INNER_PREFIX = "model."  # prefix of all tensor names but the head's
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")


Tensors = dict[str, tuple[Path, TensorInfo]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint folder whose config and headers hold together: no tensor is missing, left over or of the wrong
    shape.

    tensors  name -> (file, header entry)
    """

    folder: Path
    config: ModelConfig
    defaults: GenerationDefaults
    format: WeightFormat
    tensors: Tensors

    @property
    def quantization(self) -> str:
        """Name of the quantization for users, such as "gptq-int4-g128", or the dtype of an unquantized checkpoint."""
        return self.format.name

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(info.nbytes for _, info in self.tensors.values())


def inspect_checkpoint(path: str | Path) -> Checkpoint:
    """Check a local folder from its JSON files and headers alone; no tensor is read or allocated.

    Pickles may lie beside safetensors, as in many repositories: nothing here opens one, so they do no harm.
    Without safetensors they are refused by name, and `auto_map` (code of the checkpoint's own) always is.
    Raises CheckpointError naming the file and the tensor or key at fault.
    """
    folder = Path(path).resolve()
    if not folder.is_dir():
        raise CheckpointError("there is no such folder", file=str(path))
    refuse_unsupported_files(folder)
    if not has_entry(folder, CONFIG):
        raise CheckpointError("is missing; a checkpoint folder has one", file=CONFIG)
    fields = JsonFields(read_json(folder, CONFIG, MAX_CONFIG_BYTES), CONFIG)
    refuse_unsupported_config(fields, folder)
    config = read_config(fields)
    defaults = read_generation_config(folder, config.vocab_size, config.eos_token_ids)
    tensors = _with_model_prefix(_tensors(folder))
    format = read_format(fields, folder, config, tensors.keys())
    check_tensors(tensors, decoder_layout(config, format))
    if "dtype" not in fields and "torch_dtype" not in fields:
        config = replace(config, dtype=FLOAT_DTYPES[tensors[EMBEDDING][1].dtype])
    return Checkpoint(folder, config, defaults, format, tensors)


def _tensors(folder: Path) -> Tensors:
    """Return all tensors: from model.safetensors, from the shards of its index, or from the only safetensors file there
    is.
    """
    if has_entry(folder, SINGLE_FILE):
        if has_entry(folder, INDEX):
            log.warning(
                "%s is loaded, as in transformers; %s beside it, with its files, is ignored", SINGLE_FILE, INDEX
            )
        return _tensors_by_name([resolve_within(folder, SINGLE_FILE)])
    if has_entry(folder, INDEX):
        weight_map = _weight_map(folder)
        tensors = _tensors_by_name([_shard(folder, name) for name in sorted(set(weight_map.values()))])
        _check_index(weight_map, tensors)
        return tensors
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return _tensors_by_name([resolve_within(folder, others[0].name)])
    raise _no_weights(folder, [file.name for file in others])


def _no_weights(folder: Path, others: list[str]) -> CheckpointError:
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        problem = "a pickle can run code and is never opened; convert the checkpoint to safetensors"
        return CheckpointError(problem, file=pickles[0])
    found = ", ".join(others[:5]) or "none"
    return CheckpointError(f"is missing, and so is {INDEX}; safetensors files found: {found}", file=SINGLE_FILE)


def _weight_map(folder: Path) -> dict[str, str]:
    """Return the index's map from tensor name to shard name, both strings."""
    weight_map = read_json(folder, INDEX, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("must be an object of tensor names and files", file=INDEX, tensor="weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise CheckpointError(f"names the file {name!r}; expected a string", file=INDEX, tensor=tensor)
    return weight_map


def _shard(folder: Path, name: str) -> Path:
    if PurePosixPath(name).name != name or "\\" in name or "\0" in name or not name.endswith(".safetensors"):
        raise CheckpointError(f"{name[:80]!r} is not the plain name of a safetensors file in the folder", file=INDEX)
    path = resolve_within(folder, name)
    if not has_entry(folder, name):
        raise CheckpointError(f"is missing, though {INDEX} names it", file=name)
    return path


def _tensors_by_name(paths: list[Path]) -> Tensors:
    tensors: Tensors = {}
    for path in paths:
        for name, info in read_header(path).items():
            if name in tensors:
                raise CheckpointError(f"is in {tensors[name][0].name} as well", file=path.name, tensor=name)
            tensors[name] = (path, info)
    return tensors


def _with_model_prefix(tensors: Tensors) -> Tensors:
    """Return the tensors under a whole model's names. Some files, such as Qwen3-Embedding's, hold the inner model alone
    and leave out the prefix "model.".
    """
    if EMBEDDING in tensors or EMBEDDING.removeprefix(INNER_PREFIX) not in tensors:
        return tensors
    return {
        name if name.startswith(f"{HEAD}.") else INNER_PREFIX + name: (path, replace(info, stored=name))
        for name, (path, info) in tensors.items()
    }


def _check_index(weight_map: dict[str, str], tensors: Tensors) -> None:
    for name, file in weight_map.items():
        if name not in tensors or tensors[name][0].name != file:
            raise CheckpointError(f"is missing, though {INDEX} names it", file=file, tensor=name)
    for name, (path, _) in tensors.items():
        if name not in weight_map:
            raise CheckpointError(f"is in this file, but not in {INDEX}", file=path.name, tensor=name)
