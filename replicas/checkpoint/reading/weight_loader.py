"""Tensors of a checkpoint that are taken once each, with progress, and with proof that none was forgotten."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...errors import CheckpointError
from ..files.safetensors_header import TensorInfo
from .read_buffers import AllocateStaging
from .tensor_reader import TORCH_DTYPES, TensorReader
from .weight_digests import DigestPiece, Progress, digest_tensors

FindProblem = Callable[
    [str, torch.Tensor], str | None
]  # says what is wrong with the tensor of that name; None: nothing


class WeightLoader:
    """The tensors of a checked checkpoint, each to be taken once.

    `take` records what was taken; `finish` proves that this was everything. `digest` identifies the contents
    of all that was taken, whatever the order.

    problem  returns what is wrong with a tensor, or a part of one, that is taken; None: they are known to be sound
    order    names, more or less in the order in which they will be taken
    digests  whether `weight_digests` is wanted
    pieces   pieces of which `digested` is wanted
    whole    whether each tensor of `order` will be taken, and taken whole
    staging  for a device with memory of its own: makes host memory that the device copies from by itself
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[Path, TensorInfo]],
        device: torch.device,
        progress: Progress | None = None,
        problem: FindProblem | None = None,
        *,
        order: Iterable[str] = (),
        digests: bool = False,
        pieces: Collection[DigestPiece] = (),
        whole: bool = False,
        staging: AllocateStaging | None = None,
    ) -> None:
        self.device = device
        self._reader = TensorReader(tensors, order, digests=digests, pieces=pieces, whole=whole, staging=staging)
        self._lock = threading.Lock()  # guards the progress
        self._problem = problem
        self._tensors = tensors
        self._files: dict[Path, Any] = {}
        self._taken: set[str] = set()
        self._left: set[str] = set()
        self._progress = progress
        self._done_bytes = 0
        self._total_bytes = sum(info.nbytes for _, info in tensors.values())

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor of that name."""
        return self._tensors[name][1].shape

    def take(self, name: str, *part: slice) -> torch.Tensor:
        """Return the tensor as stored, on the device; once `finish` was called it no longer depends on the files.

        part  slice of each of its first dimensions; nothing else of it is read. Progress counts the tensor as read
        """
        tensor = self._taking(name, *part)
        if self._problem is not None and (problem := self._problem(name, tensor)) is not None:
            raise self.error(name, problem)
        return tensor.to(self.device)

    def _taking(self, name: str, *part: slice, retained: bool = False) -> torch.Tensor:
        assert name not in self._taken, f"{name} is taken twice"
        assert name not in self._left, f"{name} is another stage's"
        tensor = self._read(name, *part, retained=retained)
        self._taken.add(name)
        with self._lock:
            self._done_bytes += self._tensors[name][1].nbytes
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)
        return tensor

    def _read(self, name: str, *part: slice, retained: bool) -> torch.Tensor:
        info = self._tensors[name][1]
        rows = rows_of_part(info.shape, part)
        if info.dtype not in TORCH_DTYPES or rows is None:
            return self.peek(name, *part)
        try:
            if rows == _all_rows(info.shape):
                return self._reader.whole(name, retained=retained)
            return self._reader.rows(name, *rows)
        except CheckpointError as error:
            if error.tensor:
                raise
            raise self.error(name, f"cannot be read: {error.message}") from error
        except OSError as error:
            raise self.error(name, f"cannot be read: {error.strerror}") from error

    def skip(self, names: Iterable[str]) -> None:
        """Mark tensors as another pipeline stage's: they count as used, and as part of the contents."""
        left = {name for name in names if name in self._tensors}
        self._left |= left
        self._done_bytes += sum(self._tensors[name][1].nbytes for name in left)

    def peek(self, name: str, *part: slice) -> torch.Tensor:
        """Return a view of the mapped file, or a copy of a part of it, on the CPU; nothing is recorded."""
        path, info = self._tensors[name]
        stored = info.stored or name
        whole = all(each.indices(size) == (0, size, 1) for each, size in zip(part, info.shape, strict=False))
        tensor: torch.Tensor
        try:
            if path not in self._files:
                self._files[path] = safe_open(str(path), framework="pt", device="cpu")
            file = self._files[path]
            tensor = file.get_tensor(stored) if whole else file.get_slice(stored)[part]
        except (SafetensorError, OSError) as error:  # the file changed since its header was checked
            raise self.error(name, f"cannot be read: {error}") from error
        return tensor

    def take_finite(self, name: str, dtype: torch.dtype, *part: slice, retained: bool = False) -> torch.Tensor:
        """Return the tensor in `dtype`. Raises CheckpointError if a value is not finite, or not in that dtype.

        retained  whether the tensor is kept as it is, if that is its dtype, since nothing is made from it
        """
        stored = self._taking(name, *part, retained=retained)
        tensor = stored.to(self.device).to(dtype)
        if not tensor.numel():
            return tensor
        low, high = torch.aminmax(tensor)
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            if self._problem is not None and (problem := self._problem(name, stored)) is not None:
                raise self.error(name, problem)
            hint = "; load with dtype bfloat16 or float32" if dtype == torch.float16 else ""
            raise self.error(name, f"has values that are not finite in {str(dtype).removeprefix('torch.')}{hint}")
        return tensor

    def unmap(self) -> None:
        """Drop the files' pages, except those that a tensor is a view of. Files are opened again when needed."""
        self._files.clear()

    def error(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(problem, file=self._tensors[name][0].name, tensor=name)

    def abandon(self) -> None:
        """Close the files, since nothing more will be taken and what was taken is not wanted."""
        self._files.clear()
        self._reader.stop()

    def finish(self, tolerated: Callable[[str], bool]) -> None:
        """Close the files. Raises CheckpointError if a tensor was left over that is not tolerated."""
        self._files.clear()
        try:
            self._reader.close()
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}") from error
        for name in self._tensors:
            if name not in self._digested_names and not tolerated(name):
                raise self.error(name, "was not used by any part of the model")

    @property
    def _digested_names(self) -> set[str]:
        return self._taken | self._left

    @property
    def weight_digests(self) -> Mapping[str, bytes]:
        """Digest of each tensor that was taken whole, computed while reading."""
        return self._reader.weight_digests

    @property
    def digested(self) -> Mapping[DigestPiece, bytes]:
        """Digest of each of `pieces` that was taken whole, computed while reading; columns have none."""
        return self._reader.digested

    def digest(self) -> bytes:
        """Return the digest of all tensors taken or left, whole whatever part of them was taken. Raises
        CheckpointError.
        """
        return digest_tensors(self._tensors, self._digested_names)


def rows_of_part(shape: Sequence[int], part: Sequence[slice]) -> tuple[int, int] | None:
    """Return the rows [first, last) that a part of a tensor consists of; None if it has only parts of rows, or not
    consecutive ones.
    """
    spans = [each.indices(size) for each, size in zip(part, shape, strict=False)]
    partly = [span != (0, size, 1) for span, size in zip(spans, shape, strict=False)]
    if any(partly[1:]) or (any(partly) and spans[0][2] != 1):
        return None
    return spans[0][:2] if spans else _all_rows(shape)


def _all_rows(shape: Sequence[int]) -> tuple[int, int]:
    return 0, shape[0] if shape else 1


class MetaWeightLoader(WeightLoader):
    """Tensors by shape and dtype alone, on the meta device: a model made of it shows how much it would hold."""

    def take(self, name: str, *part: slice) -> torch.Tensor:
        return self.peek(name, *part)

    def peek(self, name: str, *part: slice) -> torch.Tensor:
        info = self._tensors[name][1]
        return torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype], device="meta")[part]

    def take_finite(self, name: str, dtype: torch.dtype, *part: slice, retained: bool = False) -> torch.Tensor:
        return self.take(name, *part).to(dtype)


def satisfies(values: torch.Tensor, condition: Callable[[torch.Tensor], torch.Tensor], *, outlined: bool) -> bool:
    """Return whether the values meet the condition; for an outline, which has no values, return `outlined`.

    An outline is not evaluated, since torch imports its compiler, for a second, for arithmetic on the meta device.
    """
    return outlined if values.is_meta else bool(condition(values))
