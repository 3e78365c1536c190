"""Check of a model folder against its manifest: its bytes by their digests, its behaviour by the held-out loss."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from .demo_checkpoint import HELD_OUT, MANIFEST, file_digests
from .demo_quality import held_out_loss
from .plain_model import load_plain

LOSS_TOLERANCE = 1e-3  # largest relative difference; another order of fp32 sums changes the loss by about 1e-6


def digest_problems(folder: Path) -> list[str]:
    """Return a sentence for each file that is missing, changed or not in the manifest (for example a pickle)."""
    wanted: dict[str, str] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    found = file_digests(folder)
    problems = [f"{name}: not in the manifest" for name in sorted(found.keys() - wanted.keys())]
    for name, digest in wanted.items():
        if found.get(name) != digest:
            problems.append(f"{name}: sha256 is {found.get(name, 'missing')}, the manifest says {digest}")
    return problems


def loss_problems(folder: Path) -> tuple[float, list[str]]:
    """Return the dequantized model's held-out loss in nats per token, and the problems found.

    The problems are a sentence if the manifest has another loss, and else empty.
    """
    wanted: float = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["held_out"]["loss_int4"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode((folder / HELD_OUT).read_text(encoding="utf-8")).ids
    loss = held_out_loss(load_plain(folder), ids)
    if abs(loss / wanted - 1) <= LOSS_TOLERANCE:
        return loss, []
    return loss, [f"held-out loss is {loss:.5f} nats/token, the manifest says {wanted}"]


def run_verify(folder: Path) -> int:
    """Print what is right and wrong in the folder; return 0 if everything matches the manifest, and else 1.

    The model is loaded only if all digests are right.
    """
    problems = digest_problems(folder)
    if not problems:
        for name, digest in file_digests(folder).items():
            print(f"{digest}  {name}")
        loss, problems = loss_problems(folder)
        print(f"held-out loss {loss:.5f} nats/token")
    print("\n".join(f"MISMATCH {problem}" for problem in problems) or "matches the manifest")
    return 1 if problems else 0
