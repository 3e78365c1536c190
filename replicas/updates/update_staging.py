"""Staging of a file of new weights: it is checked against the model that serves, and copied to where no other process
writes.

The copy has whole tensors only; deltas are added up. So it is read like any other part of the checkpoint: a layer that
is built of old and new tensors is what a fresh load of the changed checkpoint would build.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import torch

from ..checkpoint.files.checkpoint_folder import open_checkpoint_file
from ..checkpoint.files.safetensors_header import (
    DTYPE_BITS,
    PREFIX_BYTES,
    TensorInfo,
    read_header,
    read_header_length,
)
from ..checkpoint.reading.weight_digests import digest_tensors
from ..checkpoint.reading.weight_loader import WeightLoader
from ..errors import CheckpointError, InvalidRequest, Unavailable
from ..host.threaded_tasks import run_in_threads
from ..model.checkpoint_inspection import Checkpoint, Tensors
from ..model.model_config import ModelConfig
from ..model.tensor_layout import (
    EMBEDDING,
    HEAD,
    check_tensor,
    decoder_layout,
    find_problem,
    head_format,
    head_is_tied,
    head_spec,
)
from ..quantization.weight_format import FLOAT_DTYPES, TensorSpec, WeightFormat
from .weight_file import WeightFile

__all__ = ["digest_of_file", "quantized_layers", "stage_update"]

_PIECE_BYTES = 4 << 20
_ALIGNED = 8


def quantized_layers(config: ModelConfig, format: WeightFormat) -> Iterator[frozenset[str]]:
    """Yield the names of each quantized layer's tensors (codes, scales, zeros), which must be replaced together."""
    specs = [(format, linear) for plan in config.layers for linear in plan.specs]
    for of, spec in (*specs, (head_format(format), head_spec(config))):
        names = frozenset(of.tensors(spec)) - {f"{spec.name}.bias"}
        if len(names) > 1:
            yield names


def digest_of_file(file: WeightFile) -> bytes:
    """Return a digest of a file's names, types, shapes and contents; for deltas another one than for the same tensors
    whole.

    Raises InvalidRequest and CheckpointError.
    """
    header = read_header(file.path)
    try:
        found = digest_tensors({name: (file.path, info) for name, info in header.items()}, header)
    except OSError as error:
        raise InvalidRequest(f"path: {file.path.name} cannot be read: {error.strerror}", param="path") from error
    return b"delta" * file.delta + found


def stage_update(file: WeightFile, checkpoint: Checkpoint, frozen: Sequence[str], into: Path) -> Tensors:
    """Write a file at `into` with the whole new values of the file's tensors, and return where each tensor is.

    frozen  patterns of names that must not change, in the syntax of fnmatch

    Raises InvalidRequest for a file that cannot be read as one, CheckpointError naming the tensor for whatever else is
    wrong with it, and Unavailable where there is no disk space for the copy. Then nothing of the copy is left.
    """
    found = read_header(file.path)
    _check_headers(file, found, checkpoint, frozen)
    try:
        staged = _copy_tensors(file, found, checkpoint.tensors, into)
        layout = decoder_layout(checkpoint.config, checkpoint.format)
        # Values are checked in the copy, which no other process changes.
        copied = WeightLoader(staged, torch.device("cpu"))
        run_in_threads([partial(_check_value, file, name, layout[name], copied) for name in staged])
    except OSError as error:
        into.unlink(missing_ok=True)
        raise CheckpointError(f"cannot be copied to {into.parent}: {error.strerror}", file=file.path.name) from error
    except BaseException:
        into.unlink(missing_ok=True)
        raise
    return staged


def _check_headers(
    file: WeightFile, found: dict[str, TensorInfo], checkpoint: Checkpoint, frozen: Sequence[str]
) -> None:
    """Raise an error for whatever is wrong with a file of new weights, as far as headers show it."""
    of = file.path.name
    if not found:
        raise InvalidRequest(f"path: {of} holds no tensor", param="path")
    layout = decoder_layout(checkpoint.config, checkpoint.format)
    tied, copy = head_is_tied(checkpoint.config, checkpoint.format), f"{HEAD}.weight"
    for name, info in found.items():
        if name not in checkpoint.tensors or name not in layout:
            hint = f"; the head is tied, so that {EMBEDDING} is all of it" if tied and name == copy else ""
            raise CheckpointError(f"belongs to no part of the model that is served{hint}", file=of, tensor=name)
        if (pattern := next((one for one in frozen if fnmatchcase(name, one)), None)) is not None:
            raise CheckpointError(f"is frozen: frozen_weights has {pattern!r}", file=of, tensor=name)
        check_tensor(name, of, info, layout[name])
    if tied and copy in checkpoint.tensors and (copy in found) != (EMBEDDING in found):
        problem = f"is the same as {copy if EMBEDDING in found else EMBEDDING}, which is stored too: change both"
        raise CheckpointError(problem, file=of, tensor=EMBEDDING if EMBEDDING in found else copy)
    for names in quantized_layers(checkpoint.config, checkpoint.format):
        _check_quantized(file, found, names & checkpoint.tensors.keys())


def _check_value(file: WeightFile, name: str, spec: TensorSpec, copied: WeightLoader) -> None:
    """Raise CheckpointError for values that the model cannot have. The error names the user's file, not the copy."""
    tensor = copied.peek(name)
    problem = find_problem(spec, tensor)
    if problem is None and file.delta and not bool(torch.isfinite(tensor.float().abs().max().square())):
        problem = "is too large with what is added: the square of a value is not finite in float32"
    if problem is not None:
        raise CheckpointError(problem, file=file.path.name, tensor=name)


def _check_quantized(file: WeightFile, found: Collection[str], names: frozenset[str]) -> None:
    given = sorted(names.intersection(found))
    if given and file.delta:
        problem = "is of a quantized layer, to which nothing can be added: replace it whole"
        raise CheckpointError(problem, file=file.path.name, tensor=given[0])
    if given and len(given) < len(names):
        missing = ", ".join(sorted(names.difference(given)))
        problem = f"is of a quantized layer, which is replaced whole: without {missing} it means nothing"
        raise CheckpointError(problem, file=file.path.name, tensor=given[0])


def _copy_tensors(file: WeightFile, found: dict[str, TensorInfo], tensors: Tensors, into: Path) -> Tensors:
    """Copy the tensors, those with the largest types first, so that each is aligned. The file is read rather than
    mapped, so that truncating it meanwhile does no harm.
    """
    dtypes = {name: tensors[name][1].dtype if file.delta else info.dtype for name, info in found.items()}
    staged: dict[str, TensorInfo] = {}
    at = 0
    for name in sorted(found, key=lambda name: (-DTYPE_BITS[dtypes[name]], name)):
        info = found[name]
        nbytes = info.nbytes * DTYPE_BITS[dtypes[name]] // DTYPE_BITS[info.dtype]
        staged[name] = TensorInfo(dtypes[name], info.shape, at, at + nbytes)
        at += nbytes
    base = WeightLoader(tensors, torch.device("cpu"))
    with open_checkpoint_file(file.path.parent, file.path.name) as (source, size), _created(into) as copy:
        start = PREFIX_BYTES + read_header_length(source.read(PREFIX_BYTES), size, file.path.name)
        _write(copy, _header(staged))
        for name in staged:
            pieces = _pieces(source, start, name, found[name], file.path.name)
            if not file.delta:
                for piece in pieces:
                    _write(copy, piece)
                continue
            delta = torch.frombuffer(bytearray().join(pieces), dtype=FLOAT_DTYPES[found[name].dtype])
            whole = base.peek(name)
            added = (whole.float() + delta.view(whole.shape).float()).to(whole.dtype)
            _write(copy, added.contiguous().view(-1).view(torch.uint8).numpy().data)
    return {name: (into, info) for name, info in staged.items()}


def _created(path: Path) -> FileIO:
    """Create a file that only this user may read, because weights may be confidential."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0)


def _write(copy: FileIO, data: bytes | memoryview) -> None:
    """Write all of the data to the copy of a file. Raises Unavailable where there is no disk space."""
    left = memoryview(data)
    while left:
        try:
            left = left[copy.write(left) :]
        except OSError as error:
            raise Unavailable(
                f"the new weights cannot be stored in this host's temporary folder: {error.strerror}", code="no_room"
            ) from error


def _header(tensors: dict[str, TensorInfo]) -> bytes:
    """Return the header of a safetensors file, up to the first byte of data."""
    entries = {
        name: {"dtype": info.dtype, "shape": info.shape, "data_offsets": [info.begin, info.end]}
        for name, info in tensors.items()
    }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def _pieces(source: BinaryIO, start: int, name: str, info: TensorInfo, file: str) -> Iterator[bytes]:
    source.seek(start + info.begin)
    left = info.nbytes
    while left:
        piece = source.read(min(left, _PIECE_BYTES))
        if not piece:
            raise CheckpointError("is shorter than its header says", file=file, tensor=name)
        left -= len(piece)
        yield piece
