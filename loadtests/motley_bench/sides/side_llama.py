"""Side of llama.cpp, through the C interface of llama-cpp-python: batched decode of several sequences."""

from __future__ import annotations

import ctypes
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoints.gguf_writer import write_gguf
from ..checkpoints.random_checkpoint import CheckpointShape
from .side_process import prompt

_CHUNK = 512  # tokens of one llama_decode call
_DECODE_TOKENS = 1024  # tokens that a sequence may still decode


class LlamaSide:
    def __init__(self, file: Path, vocab_size: int, threads: int) -> None:
        import llama_cpp

        self._api = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp refused {file}")
        self._threads = threads
        self._context: Any = None
        self._sizes = (0, 0)
        self._batch = llama_cpp.llama_batch_init(_CHUNK, 0, 1)
        self._vocab_size = vocab_size
        self._seed = 0
        self._position = 0
        self._next: list[int] = []

    def describe(self) -> dict[str, Any]:
        return {
            "version": version("llama-cpp-python"),
            "bytes_per_token": self._api.llama_model_size(self._model),
            "weights": "Q4_0 layers, Q8_0 head",
            "build": self._api.llama_print_system_info().decode(),
        }

    def prefill(self, tokens: int) -> float:
        self._prepare(1, tokens)
        self._seed += 1
        ids = prompt(tokens, self._vocab_size, self._seed)
        began = time.perf_counter()
        self._prompt(ids, sequence=0)
        return time.perf_counter() - began

    def open(self, batch: int, context: int) -> None:
        self._prepare(batch, context + _DECODE_TOKENS)
        self._next = []
        for sequence in range(batch):
            self._seed += 1
            self._next.append(self._prompt(prompt(context, self._vocab_size, self._seed), sequence))
        self._position = context

    def decode(self, steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            rows = [(token, self._position, sequence, True) for sequence, token in enumerate(self._next)]
            self._decode(rows)
            self._next = [self._best(row) for row in range(len(rows))]
            self._position += 1
            seconds.append(time.perf_counter() - began)
        return seconds

    def close(self) -> None:
        self._clear()

    def _prepare(self, sequences: int, tokens: int) -> None:
        """Make an empty context for so many sequences, each of at most so many tokens.

        Every sequence has a KV stream of its own: with one for all (`kv_unified`) a sequence's attention also passes
        over the others' tokens, and a step took 607 ms instead of 496 at batch 32, and 216 ms instead of 199 at batch
        8.
        """
        if self._sizes == (sequences, tokens):
            self._clear()
            return
        self._free()
        params = self._api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = sequences * -(-tokens // 256) * 256, _CHUNK, _CHUNK
        params.n_seq_max, params.kv_unified = sequences, False
        params.n_threads = params.n_threads_batch = self._threads
        self._context = self._api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp refused a context of {sequences} sequences with {tokens} tokens")
        self._sizes = sequences, tokens

    def _free(self) -> None:
        if self._context:
            self._api.llama_free(self._context)
        self._context, self._sizes = None, (0, 0)

    def _clear(self) -> None:
        if self._context:
            self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def _prompt(self, ids: list[int], sequence: int) -> int:
        """Compute a prompt and return its first output token."""
        rows = [(token, position, sequence, position == len(ids) - 1) for position, token in enumerate(ids)]
        for start in range(0, len(rows), _CHUNK):
            self._decode(rows[start : start + _CHUNK])
        return self._best(-1)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Compute rows of (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = wanted
        if status := self._api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode: {status}")

    def _best(self, row: int) -> int:
        logits = self._api.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


def build(folder: Path, threads: int) -> LlamaSide:
    fields = json.loads((folder / "config.json").read_text())
    shape = CheckpointShape(**{name: fields[name] for name in CheckpointShape.__dataclass_fields__})
    file = folder / "model.gguf"
    if not file.exists():
        partial = file.with_suffix(".partial")
        write_gguf(shape, partial)
        partial.rename(file)
    return LlamaSide(file, shape.vocab_size, threads)
