"""Check whether a checkpoint can be served, from its headers and its tokenizer and before anything is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .errors import CheckpointError

BAD = 3  # exit status
REMEDY = "; download the checkpoint again, or convert it again"


def check_servable(folder: str | Path) -> None:
    """Raise CheckpointError naming the file at fault. Faults that only show in a tensor's values are found while
    loading.
    """
    from .checkpoint import inspect_checkpoint
    from .tokenizer import FILE, Tokenizer

    inspect_checkpoint(folder)
    if not Tokenizer.is_in(Path(folder)):
        message = "is missing, and a service reads and writes text; put the tokenizer's files into the folder"
        raise CheckpointError(message, file=FILE)
    Tokenizer.load(folder)


def check_in_process(folder: str | Path) -> None:
    """Check in a process of its own, so that its imports (torch, above all) do not stay in this one's memory. Raises
    CheckpointError.
    """
    command = [sys.executable, "-m", __name__, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode == BAD:
        message = ended.stdout.strip()
        raise CheckpointError(message if ";" in message else message + REMEDY)  # some messages have a remedy already


def main() -> int:
    try:
        check_servable(sys.argv[1])
    except CheckpointError as error:
        print(error.message)
        return BAD
    return 0


if __name__ == "__main__":
    sys.exit(main())
