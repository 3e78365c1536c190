"""Side of Hugging Face transformers in bf16: the calls that `generate` makes, without its other work around them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from .side_process import prompt


class TransformersSide:
    def __init__(self, folder: Path, threads: int) -> None:
        import transformers

        torch.set_num_threads(threads)
        fields = json.loads((folder / "config.json").read_text())
        fields.pop("quantization_config", None)
        config = transformers.Qwen2Config(**fields)
        self._model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self._version = transformers.__version__
        self._vocab_size: int = config.vocab_size
        self._seed = 0
        self._past: Any = None
        self._next = torch.empty(0, 1, dtype=torch.int64)

    def describe(self) -> dict[str, Any]:
        tied = {parameter.data_ptr(): parameter.nbytes for parameter in self._model.parameters()}
        return {"version": self._version, "bytes_per_token": sum(tied.values()), "weights": "bf16"}

    def prefill(self, tokens: int) -> float:
        began = time.perf_counter()
        self._forward(self._prompts(1, tokens), None)
        return time.perf_counter() - began

    def open(self, batch: int, context: int) -> None:
        # one sequence is computed and its KV repeated: decoding costs the same, opening much less
        output = self._forward(self._prompts(1, context), None)
        self._past = output.past_key_values
        self._past.batch_repeat_interleave(batch)
        self._next = output.logits[:, -1:].argmax(dim=-1).repeat(batch, 1)

    def decode(self, steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            output = self._forward(self._next, self._past)
            self._next = output.logits[:, -1:].argmax(dim=-1)
            self._next.tolist()
            seconds.append(time.perf_counter() - began)
        return seconds

    def close(self) -> None:
        self._past = None

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, past: Any) -> Any:
        return self._model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)

    def _prompts(self, batch: int, tokens: int) -> torch.Tensor:
        self._seed += 1
        return torch.tensor([prompt(tokens, self._vocab_size, self._seed + row) for row in range(batch)])


def build(folder: Path, threads: int) -> TransformersSide:
    return TransformersSide(folder, threads)
