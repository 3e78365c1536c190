"""Check whether a checkpoint can be served, from its headers and its tokenizer and before anything is started."""

from __future__ import annotations

import sys
from pathlib import Path

from ..errors import CheckpointError
from ..host.child_check import run_child_check

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
    """Check in a process of its own. Raises CheckpointError; a check that is killed or fails itself is a warning in the
    log, since whoever loads the checkpoint checks all of it again.
    """
    what = f"whether {folder} can be served"
    message = run_child_check(__name__, [str(folder)], refused=EXIT_NOT_SERVABLE, what=what)
    if message is not None:
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
