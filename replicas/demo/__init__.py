"""The demo model: a small Qwen2-style model trained on CPython's documentation, quantized and shipped here.

Importing this package loads nothing heavy. What trains the model, and checks the shipped one, is tools/demo_model.
Another file that the demo model ships with goes into model/.
"""

from __future__ import annotations

from pathlib import Path


def demo_path() -> Path:
    """Return the folder of the shipped demo model, in the ordinary Hugging Face layout (GPTQ int4)."""
    return Path(__file__).resolve().parent / "model"
