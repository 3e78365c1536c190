"""A stop string that ends some choices of an answer long before others, whatever a random model writes."""

from __future__ import annotations

from typing import Any

from serve_process import Served

from motley.client import Client

MINIMUM = 100  # characters before it, so as many tokens at least
CHARS = 3


def early_stop(service: Served, prompt: str, **options: Any) -> str:
    """From what the choices are without it: one has it in its first quarter, another has it nowhere."""
    with Client(service.grpc) as client:
        texts = [choice.text for choice in client.complete(prompt, **options).choices]
    for text in texts:
        for at in range(MINIMUM, len(text) // 4):
            stop = text[at : at + CHARS]
            if stop.isascii() and any(stop not in other for other in texts):
                return stop
    raise AssertionError("no text has anything of its own")
