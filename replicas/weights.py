"""Reading tensors: memory-mapped, each once, with progress and with the proof that none was forgotten."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .errors import CheckpointError
from .safetensors_file import TensorInfo

Progress = Callable[[int, int], None]  # (bytes read, bytes in all)

_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32, "U32": torch.uint32,
}  # fmt: skip


class Weights:
    """The tensors of a checked checkpoint, each to be taken once.

    `take` records what was consumed; `finish` proves that it was everything. `digest` identifies the contents
    of all that was taken, whatever the order.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[Path, TensorInfo]],
        device: torch.device,
        progress: Progress | None = None,
    ) -> None:
        self.device = device
        self._tensors = tensors
        self._files: dict[Path, Any] = {}
        self._digests: dict[str, bytes] = {}
        self._progress = progress
        self._done_bytes = 0
        self._total_bytes = sum(info.nbytes for _, info in tensors.values())

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str) -> torch.Tensor:
        """The tensor as stored, on the device. On a CPU it is a view of the mapped file: copy what is kept."""
        assert name not in self._digests, f"{name} is taken twice"
        tensor = self.peek(name)
        self._digests[name] = _digest(tensor)
        self._done_bytes += self._tensors[name][1].nbytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)
        return tensor.to(self.device)

    def peek(self, name: str) -> torch.Tensor:
        """A view of the mapped file, on the CPU; nothing is recorded."""
        path, _ = self._tensors[name]
        try:
            if path not in self._files:
                self._files[path] = safe_open(str(path), framework="pt", device="cpu")
            tensor: torch.Tensor = self._files[path].get_tensor(name)
        except (SafetensorError, OSError) as error:  # the file changed since its header was checked
            raise self.error(name, f"cannot be read: {error}") from error
        return tensor

    def take_finite(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A copy in `dtype`. Raises CheckpointError where a value is not finite, or not in that dtype."""
        tensor = self.take(name).to(dtype, copy=True)
        low, high = torch.aminmax(tensor)
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            hint = "; load with dtype bfloat16 or float32" if dtype == torch.float16 else ""
            raise self.error(name, f"has values that are not finite in {str(dtype).removeprefix('torch.')}{hint}")
        return tensor

    def error(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(problem, file=self._tensors[name][0].name, tensor=name)

    def finish(self, tolerated: Callable[[str], bool]) -> None:
        """Close the files. Raises CheckpointError if a tensor was left over that is not tolerated."""
        self._files.clear()
        for name in self._tensors:
            if name not in self._digests and not tolerated(name):
                raise self.error(name, "was not used by any part of the model")

    def digest(self) -> bytes:
        """SHA-256 over the names and contents of the tensors taken."""
        total = hashlib.sha256()
        for name, content in sorted(self._digests.items()):
            total.update(len(name.encode()).to_bytes(4, "little") + name.encode() + content)
        return total.digest()


class Outline(Weights):
    """The tensors by shape and dtype alone, on the meta device: a model made of it shows what it would keep."""

    def take(self, name: str) -> torch.Tensor:
        return self.peek(name)

    def peek(self, name: str) -> torch.Tensor:
        info = self._tensors[name][1]
        return torch.empty(info.shape, dtype=_DTYPES[info.dtype], device="meta")

    def take_finite(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.take(name).to(dtype)


def told(condition: torch.Tensor, *, outlined: bool) -> bool:
    """Whether it holds; of an outline, which has no values, what is said of one."""
    return outlined if condition.is_meta else bool(condition)


def _digest(tensor: torch.Tensor) -> bytes:
    """SHA-256 of dtype, shape and contents."""
    content = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    if tensor.numel():
        content.update(tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return content.digest()
