"""Engine as a library: no server, no threads, no Ray. Any number of streams may be open on it at a time."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch

from ....kernels.ops import Ops
from ...engine_config import EngineConfig
from ...errors import InvalidRequest
from ...execution.random_seeds import fresh_seed
from ...gpu.accelerator import Accelerator
from ...grammar.process.grammar_process import GrammarProcess
from ...kv.store.store_access import PrefixStoreAccess
from ...parallel.leader.launcher import FollowerLauncher
from ...sampling_params import SamplingParams
from ...short_repr import short_repr
from ...types import Delta, FinishReason, ModelInfo, Pooling, PromptLogprob, Request, StreamMessage, TokenLogprob
from ...updates.weight_file import WeightFile
from ..startup.engine_builder import BuiltEngine, Progress, build_engine
from .interleaved_engine import InterleavedEngine

Prompt = str | Sequence[int]

FLUSH_S = 10.0  # most seconds that closing waits for the prefix store


@dataclass(slots=True)
class CompletionOutput:
    """Output of one choice. `logprobs` has one entry per token if the request asks for them."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass(slots=True)
class RequestOutput:
    """Outputs of all choices of one prompt. `token_ids`, `text`, `finish_reason` and `logprobs` are the first
    choice's.
    """

    prompt_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PromptLogprob] | None = None
    cached_tokens: int = 0

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.outputs[0].logprobs


class Engine:
    """Engine with a model that is ready to generate, for use as a library.

    path      a folder with safetensors, or a Hugging Face id
    device    "cpu" or "cuda[:i]"
    dtype     dtype of activations: "auto", "float32", "bfloat16", "float16"
    settings  any other field of EngineConfig
    progress  called with (bytes loaded, total bytes)
    ops       operators to compute with, and `accelerator` what queues work on their device; None: those of the device
    access    connection to a prefix store that engines share; None: as the settings say
    launcher  starts the other processes of a divided model; None: they are subprocesses

    Raises CheckpointError if the model cannot be loaded, InvalidRequest for a bad setting.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        progress: Progress | None = None,
        ops: Ops | None = None,
        accelerator: Accelerator | None = None,
        access: PrefixStoreAccess | None = None,
        launcher: FollowerLauncher | None = None,
        **settings: Any,
    ) -> None:
        setting_names = set(EngineConfig.__dataclass_fields__)
        if unknown := sorted(set(settings) - setting_names):
            accepted = ", ".join(sorted(setting_names))
            raise InvalidRequest(f"{unknown[0]}: no such setting; there are {accepted}", param=unknown[0])
        config = EngineConfig(device=device, dtype=dtype, **settings)
        self._built: BuiltEngine = build_engine(
            path, config, progress=progress, ops=ops, accelerator=accelerator, access=access, launcher=launcher
        )
        if self._built.core.scheduler.prefixes.pool.total:
            self._built.warm_up()  # measures whether fetching from the store is faster than computing
        self._turns = InterleavedEngine(self._built.core)
        self._keys = itertools.count()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel open streams, write prefixes that are to be shared to the store, and free what the engine and its
        connection to the store hold.

        An engine without a store need not be closed.
        """
        if self._closed:
            return
        self._closed = True
        self._turns.close(self._turns.keys)
        self._built.flush(FLUSH_S)
        self._built.close()

    @property
    def model(self) -> ModelInfo:
        return self._built.profile.model

    @property
    def choices(self) -> dict[str, str]:
        """Automatic decisions of the engine, each with its reason."""
        return dict(self._built.choices)

    def sampling(self, **given: Any) -> SamplingParams:
        """Return the sampling parameters of the checkpoint's generation_config.json, overridden by those given."""
        return SamplingParams(**{**self._built.defaults, **given})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        output_ids: Sequence[Sequence[int]] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt (text, or token ids), batched; return outputs in the order of the prompts.

        sampling: None takes the checkpoint's own defaults.
        output_ids: resume, one list of ids so far per choice, the same for every prompt; the outputs hold what
        follows. Raises InvalidRequest, EngineFault.
        """
        requests = [self._request(prompt, sampling, output_ids) for prompt in _as_list(prompts)]
        outputs = [_empty(request) for request in requests]
        for position, message in self._run(requests):
            _add(outputs[position], message)
        return outputs

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generator[Delta, None, None]:
        """Generate for one prompt, yielding deltas as they come. Closing the iterator cancels the request."""
        for _, message in self._run([self._request(prompt, sampling, None)]):
            yield from message.deltas

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: Literal["last", "mean"] = "last", normalize: bool = True
    ) -> torch.Tensor:
        """Return one vector for each prompt (text, or token ids), fp32 [number of prompts, hidden], batched.

        pooling: the last token's final hidden state, or the mean over all tokens'.
        normalize: scale each vector to unit length. Raises InvalidRequest, EngineFault.
        """
        if pooling not in tuple(Pooling):
            raise InvalidRequest(f"pooling: {pooling!r} is not accepted; expected 'last' or 'mean'", param="pooling")
        requests = [
            replace(self._request(prompt, SamplingParams(), None), pooling=Pooling(pooling))
            for prompt in _as_list(prompts)
        ]
        embeddings = {position: message.embedding for position, message in self._run(requests)}
        vectors = torch.tensor([embeddings[position] for position in range(len(requests))])
        return torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors

    def update_weights(self, path: str | Path, *, delta: bool = False) -> int:
        """Take new values from a safetensors file; return the version of the weights, which counts updates from 0.

        delta: the file's tensors are added to the present ones, in float32. Open streams finish on the weights which
        they began with. Raises InvalidRequest, CheckpointError, Unavailable where there is not enough memory,
        EngineFault; then nothing has changed.
        """
        weights = self._built.weights
        if self._closed or weights is None:
            raise InvalidRequest(
                "engine: it has been closed" if self._closed else "path: this model is of no checkpoint"
            )
        self._built.adopt(weights.prepare(WeightFile(Path(path), delta)))
        return weights.status().version

    def logits(self, token_ids: Prompt) -> torch.Tensor:
        """Return logits fp32 [num_tokens, vocabulary] of every position of one sequence (ids, or text), computed in one
        step.
        """
        return self._built.logits(self._prompt_ids(token_ids))

    def _request(
        self, prompt: Prompt, sampling: SamplingParams | None, output_ids: Sequence[Sequence[int]] | None
    ) -> Request:
        sampling = sampling or self.sampling()
        if sampling.seed is None:
            sampling = replace(sampling, seed=fresh_seed())
        output_ids = output_ids or ()
        if output_ids and len(output_ids) != sampling.n:
            raise InvalidRequest(f"output_ids: expected one list for each of n={sampling.n}", param="output_ids")
        return Request(
            request_id=f"offline-{next(self._keys)}",
            prompt_ids=self._prompt_ids(prompt),
            sampling=sampling,
            output_ids=tuple(_ids("output_ids", ids) for ids in output_ids),
        )

    def _prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self._built.tokenizer is None:
                raise InvalidRequest("prompt: this model has no tokenizer; give token ids", param="prompt")
            prompt = self._built.tokenizer.encode(prompt, max_tokens=self.model.max_model_len)
        ids = _ids("prompt", prompt)
        if not ids:
            raise InvalidRequest("prompt: empty", param="prompt", code="invalid_value")
        return ids

    def _run(self, requests: list[Request]) -> Iterator[tuple[int, StreamMessage]]:
        if self._closed:
            raise InvalidRequest("engine: it has been closed")
        core = self._built.core
        for request in requests:
            core.check(request)  # all or none
        grammars = [self._grammar(request) for request in requests]
        position_of = {next(self._keys): position for position in range(len(requests))}
        keys = list(position_of)
        try:
            for key, position in position_of.items():
                self._turns.open(key, requests[position], grammars[position])
            for emissions in self._turns.read(keys):
                for emission in emissions:
                    yield position_of[emission.key], emission.message
                for error in (emission.error for emission in emissions if emission.error):
                    raise error
        finally:
            self._turns.close(keys)

    def _grammar(self, request: Request) -> GrammarProcess | None:
        spec, grammars = request.sampling.grammar, self._built.core.grammars
        return grammars.prepare(spec).result() if spec and grammars else None


def _ids(name: str, given: object) -> tuple[int, ...]:
    """Return token ids as a tuple; tensors and arrays are converted by tolist(). Raises InvalidRequest for a wrong
    type.
    """
    given = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(given, list | tuple) or any(type(token) is not int for token in given):
        message = f"{name}: {short_repr(given)} is not accepted; expected text or a list of integer token ids"
        raise InvalidRequest(message, param=name, code="invalid_value")
    return tuple(given)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; a single text or a single list of ids is a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        message = f"prompts: {short_repr(prompts)} is not accepted; expected text, token ids, or a list of either"
        raise InvalidRequest(message, param="prompts", code="invalid_value")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]
    return list(prompts)


def _empty(request: Request) -> RequestOutput:
    wanted = request.sampling.logprobs is not None
    outputs = [CompletionOutput(index, logprobs=[] if wanted else None) for index in range(request.sampling.n)]
    return RequestOutput(list(request.prompt_ids), outputs)


def _add(output: RequestOutput, message: StreamMessage) -> None:
    if message.cached_tokens is not None:
        output.cached_tokens = message.cached_tokens
    if message.prompt_logprobs is not None:
        output.prompt_logprobs = list(message.prompt_logprobs)
    for delta in message.deltas:
        choice = output.outputs[delta.index]
        choice.token_ids.extend(delta.token_ids)
        choice.text += delta.text
        choice.finish_reason = delta.finish_reason or choice.finish_reason
        choice.stop_reason = delta.stop_reason if delta.stop_reason is not None else choice.stop_reason
        if choice.logprobs is not None:
            choice.logprobs.extend(delta.logprobs or ())
