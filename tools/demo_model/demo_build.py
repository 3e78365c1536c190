"""Build the demo model from nothing but this Python's documentation, and compare it with the shipped one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from motley.replicas.demo import demo_path

from . import demo_corpus
from .demo_checkpoint import HELD_OUT, MANIFEST, ship
from .demo_quality import held_out_loss
from .demo_recipe import Recipe
from .demo_tokenizer import train_tokenizer
from .demo_training import TokenStream, train

LOSS_TOLERANCE = 0.02  # largest relative difference in loss that other versions or another processor may cause


def shipped_held_out() -> str:
    """Return the held-out text beside the shipped model; if there is none yet, one chosen from this Python's topics."""
    path = demo_path() / HELD_OUT
    return path.read_text(encoding="utf-8") if path.exists() else demo_corpus.choose_held_out()


def build(folder: Path, recipe: Recipe, log: Callable[[str], None]) -> dict[str, Any]:
    """Build the demo model: corpus, tokenizer, training, quantization and files. Return its manifest."""
    held_out = shipped_held_out()
    documents = demo_corpus.training_documents(held_out)
    chats = demo_corpus.chats(documents)
    tokenizer = train_tokenizer(documents, recipe)
    ids = tokenizer.encode(held_out).ids
    stream = TokenStream(documents, chats, tokenizer, recipe)
    log(f"{stream.document_tokens} tokens of documents, {len(chats)} chats, {len(ids)} tokens held out")
    model, curve = train(stream, recipe, lambda model: held_out_loss(model, ids), log)
    # Calibration continues the training stream: text of the same mix, quoted, plain and chat.
    rows, length = recipe.calibration_batch
    calibration = [stream.batch(rows, length - 1) for _ in range(recipe.calibration_batches)]
    return ship(model, tokenizer, calibration, curve, held_out, folder, recipe, log)


def compare(made: dict[str, Any], shipped: dict[str, Any]) -> tuple[bool, str]:
    """Return whether a built demo model is identical or equivalent to the shipped one, and a sentence that says how."""
    if made["files"] == shipped["files"]:
        return True, "identical: every file has the shipped digest"
    differing = sorted({name for name, _ in made["files"].items() ^ shipped["files"].items()})
    causes = [key for key in ("corpus_sha256", "versions", "machine", "recipe") if made[key] != shipped[key]]
    new, old = made["held_out"]["loss_int4_per_byte"], shipped["held_out"]["loss_int4_per_byte"]
    change = new / old - 1
    held = abs(change) <= LOSS_TOLERANCE
    return held, (
        f"{'equivalent' if held else 'NOT equivalent'}: held-out loss {new} against {old} nats/byte shipped "
        f"({change:+.2%}, limit {LOSS_TOLERANCE:.0%}); files that differ: {', '.join(differing)}; "
        f"other differences: {', '.join(causes) or 'nothing recorded'}"
    )


def run_build(folder: Path) -> int:
    """Build the demo model into ``folder`` and print a report.

    Returns 0 if the result is identical or equivalent to the shipped model, or if there is none, and else 1.
    """
    path = demo_path() / MANIFEST
    shipped = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    made = build(folder, Recipe(), lambda line: print(line, flush=True))
    print(json.dumps(made["held_out"]))
    if shipped is None:
        print(f"built {folder}; there is no shipped model to compare it with")
        return 0
    good, sentence = compare(made, shipped)
    print(sentence)
    return 0 if good else 1
