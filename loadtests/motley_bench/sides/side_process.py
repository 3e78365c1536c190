"""Process of one side of a comparison, so that each side has its own threads, libraries and memory.

It is started as `python -m motley_bench.sides.side_process NAME FOLDER THREADS`, reads one JSON command per line and
answers each with one JSON line. While one side works, the others block in a read.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

SIDES = {"motley": "side_motley", "transformers": "side_transformers", "llama.cpp": "side_llama"}


class BenchSide(Protocol):
    """Interface of one side of a comparison.

    Times are seconds by the monotonic clock, and include the greedy choice of the next token.
    """

    def describe(self) -> dict[str, Any]:
        """Return version, weights (in words) and bytes_per_token (bytes of weights read for one token at batch 1)."""
        ...

    def prefill(self, tokens: int) -> float:
        """Return the time from the start of one prompt of `tokens` tokens to its first output."""
        ...

    def open(self, batch: int, context: int) -> None:
        """Prepare `batch` sequences, each with `context` tokens in KV, for decode."""
        ...

    def decode(self, steps: int) -> list[float]:
        """Return the time of each of `steps` steps; every step gives each open sequence one token."""
        ...

    def close(self) -> None:
        """Cancel the sequences that `open` has prepared, and free their KV."""
        ...


def prompt(tokens: int, vocab_size: int, seed: int) -> list[int]:
    """Return token ids for a prompt; different seeds differ from the first token on."""
    return [(seed * 7919 + position * 104_729 + 17) % vocab_size for position in range(tokens)]


def serve(side: BenchSide) -> None:
    for line in sys.stdin:
        command = json.loads(line)
        method = command.pop("do")
        result = getattr(side, method)(**command)
        print(json.dumps({"result": result}), flush=True)


def main() -> None:
    name, folder, threads = sys.argv[1:]
    module = import_module(f".{SIDES[name]}", __package__)
    side: BenchSide = module.build(Path(folder), int(threads))
    print(json.dumps({"result": side.describe()}), flush=True)
    serve(side)


if __name__ == "__main__":
    main()
