"""Whether a CPU's machine could ever hold a model's weights, told from headers before anything is started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .engine_config import EngineConfig
from .errors import InvalidRequest
from .host_memory import total_memory

__all__ = ["check_memory"]

BAD = 3  # exit status
GROWTH = 2  # weights take so many times the bytes of their files at most: half precision that is computed in fp32
_FIELDS = ("dtype", "numerics", "cpu_weights")


def check_memory(folder: Path, config: EngineConfig) -> None:
    """Raises InvalidRequest where the weights take more than the machine has. Small models are not looked at closely.

    What else runs there, and how much is free right now, is not asked: it may end.
    """
    if _file_bytes(folder) * GROWTH <= total_memory():
        return
    given = json.dumps({name: getattr(config, name) for name in _FIELDS})
    command = [sys.executable, "-m", __name__, str(folder), given]  # what it imports is not to stay in this process
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode == BAD:
        raise InvalidRequest(ended.stdout.strip(), param="model")


def _file_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def too_large(folder: Path, config: EngineConfig) -> str:
    """Why the machine cannot hold it; empty: it may."""
    from .build import operators
    from .checkpoint import inspect_checkpoint
    from .fit import Asked, outlined, parts_of
    from .protocol import BLOCK_TOKENS

    checkpoint = inspect_checkpoint(folder)
    ops, _ = operators(config, checkpoint.config.dtype)
    decoder = outlined(checkpoint.config, checkpoint.format, checkpoint.tensors, ops)
    weights, there = parts_of(decoder, Asked(BLOCK_TOKENS, 1, 1, 1)).loaded, total_memory()
    if weights <= there:
        return ""
    return (
        f"model: its weights take {weights / 2**30:.1f} GiB on a CPU, and this machine has {there / 2**30:.1f} GiB; "
        f"`motley fit {folder}` tells what would hold it, and --weights-memory (weights_memory of a pool's engine) "
        "keeps on disk what does not fit"
    )


def main() -> int:
    folder, given = sys.argv[1:]
    message = too_large(Path(folder), EngineConfig(**json.loads(given)))
    if message:
        print(message)
    return BAD if message else 0


if __name__ == "__main__":
    sys.exit(main())
