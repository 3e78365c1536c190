"""Side of Hugging Face transformers in bf16 on a GPU: static cache, torch's SDPA, and decode also compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ..checkpoints.random_model import config_of
from .gpu_side_process import DeviceSide
from .side_process import prompt

Step = Callable[[torch.Tensor, Any], torch.Tensor]  # ids [B, n], cache -> the next ids [B, 1]


class StaticCacheSide(DeviceSide):
    """Tasks of the transformers side. Its weights are random and made on the device, as Motley's are."""

    def __init__(self, shape: str, device: str) -> None:
        import transformers

        super().__init__(device)
        fields = config_of(shape)
        config_class = getattr(transformers, fields.pop("architectures")[0].replace("ForCausalLM", "Config"))
        fields.pop("torch_dtype")
        self._config = config_class(**fields)
        with torch.device(self.device):
            self._model = transformers.AutoModelForCausalLM.from_config(
                self._config, dtype=torch.bfloat16, attn_implementation="sdpa"
            ).eval()
        self._version = transformers.__version__
        self._cache_class = transformers.StaticCache

    def describe(self) -> dict[str, Any]:
        tied = {parameter.data_ptr(): parameter.nbytes for parameter in self._model.parameters()}
        embedding = 0 if self._config.tie_word_embeddings else self._model.get_input_embeddings().weight.nbytes
        return {"version": self._version, "weights": "bf16", "bytes_per_token": sum(tied.values()) - embedding}

    @torch.no_grad()
    def prefill(self, tokens: int, repeats: int) -> list[float]:
        """Return the seconds from a prompt to its first output, `repeats` times; a first run, which warms up, is left
        out.
        """
        return [self._timed(self._one_prompt, tokens, seed) for seed in range(repeats + 1)][1:]

    @torch.no_grad()  # as torch.compile wants it
    def decode(
        self, batch: int, context_tokens: int, output_tokens: int, steps: int, compiled: bool, within_s: float
    ) -> dict[str, Any]:
        """Return the seconds of each decode step (step_s), with `context_tokens` or more tokens in the cache.

        The cache holds constants instead of a text's KV, which costs the same. compile_s is the time of the first three
        steps, in which torch compiles.
        """
        cache = self._filled(batch, context_tokens, context_tokens + output_tokens)
        step = torch.compile(self._step, mode="reduce-overhead") if compiled else self._step
        ids = torch.ones((batch, 1), dtype=torch.int64, device=self.device)
        began, seconds = time.monotonic(), list[float]()
        for number in range(min(steps + 3, output_tokens - 1)):
            if compiled:
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            before = time.perf_counter()
            ids = step(ids, cache).clone()
            ids.tolist()  # `generate` reads them too
            seconds.append(time.perf_counter() - before)
            if number >= 3 and time.monotonic() - began > within_s:
                break
        return {"step_s": seconds[3:], "compile_s": sum(seconds[:3])}

    def _step(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        output = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        chosen: torch.Tensor = output.logits[:, -1:].argmax(dim=-1)
        return chosen

    def _one_prompt(self, tokens: int, seed: int) -> None:
        ids = torch.tensor([prompt(tokens, self._config.vocab_size, seed)], device=self.device)
        self._step(ids, self._cache_class(config=self._config, max_cache_len=tokens + 1)).tolist()

    def _filled(self, batch: int, tokens: int, capacity: int) -> Any:
        """Return a static cache of `capacity` tokens that holds `tokens` tokens."""
        cache = self._cache_class(config=self._config, max_cache_len=capacity)
        self._step(torch.ones((batch, 1), dtype=torch.int64, device=self.device), cache)  # allocates it
        for layer in cache.layers:
            layer.keys[:, :, :tokens].fill_(0.01)
            layer.values[:, :, :tokens].fill_(0.01)
            if isinstance(length := getattr(layer, "cumulative_length", None), torch.Tensor):
                length.fill_(tokens)  # other layers derive the length from the keys
        return cache

    def _timed(self, work: Callable[..., None], *arguments: Any) -> float:
        before = time.perf_counter()
        work(*arguments)
        return time.perf_counter() - before


def build(shape: str, device: str) -> StaticCacheSide:
    return StaticCacheSide(shape, device)
