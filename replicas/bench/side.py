"""One side of a comparison, in a process of its own: its threads, libraries and memory stay its own.

Started as `python -m motley.replicas.bench.side NAME FOLDER THREADS`; reads one JSON command a line and answers
each with one JSON line. While one side works the others block in a read.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

SIDES = {"motley": "side_motley", "transformers": "side_transformers", "llama.cpp": "side_llama"}


class Side(Protocol):
    """What is measured. Times are seconds by the monotonic clock, greedy choice of the next token included."""

    def describe(self) -> dict[str, Any]:
        """version, weights (in words), bytes_per_token (weights read for one token at batch 1)."""
        ...

    def prefill(self, tokens: int) -> float:
        """One prompt of so many tokens, up to its first output."""
        ...

    def open(self, batch: int, context: int) -> None:
        """So many sequences, each with `context` tokens in KV, ready to decode."""
        ...

    def decode(self, steps: int) -> list[float]:
        """Every step gives each open sequence one token."""
        ...

    def close(self) -> None:
        """Drop what was opened."""
        ...


def prompt(tokens: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids, different for different seeds from the first on."""
    return [(seed * 7919 + position * 104_729 + 17) % vocab_size for position in range(tokens)]


def serve(side: Side) -> None:
    for line in sys.stdin:
        command = json.loads(line)
        method = command.pop("do")
        result = getattr(side, method)(**command)
        print(json.dumps({"result": result}), flush=True)


def main() -> None:
    name, folder, threads = sys.argv[1:]
    module = import_module(f".{SIDES[name]}", __package__)
    side: Side = module.build(Path(folder), int(threads))
    print(json.dumps({"result": side.describe()}), flush=True)
    serve(side)


if __name__ == "__main__":
    main()
