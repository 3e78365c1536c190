"""Safetensors files byte by byte, so that a test can write what no library would."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    """(header, tensor data) of a good file."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(path: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    """Write a file whose header is an object, or these very bytes."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    header, data = split(path)
    change(header)
    join(path, header, data)


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Load, change and write again a file that stays valid."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
