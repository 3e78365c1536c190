"""Check whether a checkpoint can be served, from its headers and its tokenizer and before anything is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ..errors import CheckpointError

EXIT_NOT_SERVABLE = 3  # exit status
REMEDY = "; download the checkpoint again, or convert it again"


def check_servable(folder: str | Path) -> None:
    """Raise CheckpointError naming the file at fault. Faults that only show in a tensor's values are found while
    loading.
    """
    from ..model.checkpoint_inspection import inspect_checkpoint
    from ..text.tokenizer.tokenizer import TOKENIZER_FILE, Tokenizer

    inspect_checkpoint(folder)
    if not Tokenizer.is_in(Path(folder)):
        message = "is missing, and a service reads and writes text; put the tokenizer's files into the folder"
        raise CheckpointError(message, file=TOKENIZER_FILE)
    Tokenizer.load(folder)


def check_servable_in_child(folder: str | Path) -> None:
    """Check in a process of its own, so that its imports (torch, above all) do not stay in this one's memory. Raises
    CheckpointError.
    """
    command = [sys.executable, "-m", __name__, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode == EXIT_NOT_SERVABLE:
        message = ended.stdout.strip()
        raise CheckpointError(message if ";" in message else message + REMEDY)  # some messages have a remedy already


def main() -> int:
    try:
        check_servable(sys.argv[1])
    except CheckpointError as error:
        print(error.message)
        return EXIT_NOT_SERVABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
