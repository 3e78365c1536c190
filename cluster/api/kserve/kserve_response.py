"""Conversion of an answer's choices to KServe's output tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....replicas.errors import InvalidRequest
from ....replicas.sampling_params import SamplingParams
from ....replicas.types import Delta, PromptLogprob, Request, TokenLogprob, WeightsStatus
from ...request_errors import unknown_field
from ..common.collected_response import CollectedChoice
from .kserve_tensors import BYTES, FP32, INT32, Tensor

Choices = Sequence[Delta | CollectedChoice]
Logprobs = Sequence[TokenLogprob]

# Output -> datatype and dimensions, -1 for a dimension that varies.
OUTPUTS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "text_output": (BYTES, (-1,)),
    "finish_reason": (BYTES, (-1,)),
    "index": (INT32, (-1,)),
    "output_ids": (INT32, (-1,)),
    "output_lengths": (INT32, (-1,)),
    "logprobs": (FP32, (-1,)),
    "top_ids": (INT32, (-1, -1)),
    "top_logprobs": (FP32, (-1, -1)),
    "prompt_logprobs": (FP32, (-1,)),
    "prompt_top_ids": (INT32, (-1, -1)),
    "prompt_top_logprobs": (FP32, (-1, -1)),
}
_NEEDS = {  # output -> the parameter it needs, and the least value of that
    "logprobs": ("logprobs", 0),
    "top_ids": ("logprobs", 1),
    "top_logprobs": ("logprobs", 1),
    "prompt_logprobs": ("prompt_logprobs", 0),
    "prompt_top_ids": ("prompt_logprobs", 1),
    "prompt_top_logprobs": ("prompt_logprobs", 1),
}
_ALWAYS = ("text_output", "finish_reason")
_WITH_LOGPROBS = ("output_ids", "output_lengths")


@dataclass(frozen=True, slots=True)
class InferResponse:
    """A response, or a part of one. `error`: in place of outputs, only for a stream's requests. `last`: nothing
    follows it.
    """

    id: str
    model: str = ""
    outputs: Sequence[Tensor] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    last: bool = False


def requested_outputs(names: Sequence[str], sampling: SamplingParams) -> tuple[str, ...]:
    """Return the outputs that are asked for, or the request's default ones. Raises InvalidRequest naming one."""
    for name in names:
        if name not in OUTPUTS:
            raise unknown_field(f"outputs.{name[:80]}")
        if names.count(name) > 1:
            raise InvalidRequest(f"outputs.{name}: given twice", param=f"outputs.{name}", code="invalid_value")
        if not _possible(name, sampling):
            parameter, minimum = _NEEDS[name]
            raise InvalidRequest(
                f"outputs.{name}: it needs parameters.{parameter} of at least {minimum}",
                param=f"outputs.{name}",
                code="invalid_value",
            )
    return tuple(names) or _default_outputs(sampling)


def _default_outputs(sampling: SamplingParams) -> tuple[str, ...]:
    more = ["index"] if sampling.n > 1 else []
    more += _WITH_LOGPROBS if sampling.logprobs is not None else ()
    return (*_ALWAYS, *more, *(name for name in _NEEDS if _possible(name, sampling)))


def _possible(name: str, sampling: SamplingParams) -> bool:
    if name not in _NEEDS:
        return True
    parameter, minimum = _NEEDS[name]
    given = getattr(sampling, parameter)
    return given is not None and given >= minimum


def output_tensors(
    output_names: Sequence[str], choices: Choices, sampling: SamplingParams, prompt: Sequence[PromptLogprob] | None
) -> list[Tensor]:
    """Return those of `output_names` that this part of the answer has; the prompt's are in only one of the parts."""
    return [_BUILD[name](choices, sampling) for name in output_names if name in _BUILD] + [
        _BUILD_PROMPT[name](prompt, sampling) for name in output_names if name in _BUILD_PROMPT and prompt is not None
    ]


def usage(request: Request, completion_tokens: int, cached_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": completion_tokens,
        "cached_tokens": cached_tokens,
        "seed": request.sampling.seed or 0,
    }


def weights_parameter(weights: Sequence[WeightsStatus]) -> dict[str, str]:
    """Return the parameter `weights`: version and, if there is one, digest of each version of weights used, in
    order.
    """
    if not weights:
        return {}
    return {"weights": ",".join(f"{one.version}:{one.contents}".rstrip(":") for one in weights)}


def _texts(choices: Choices, sampling: SamplingParams) -> Tensor:
    return _vector("text_output", [choice.text.encode() for choice in choices])


def _reasons(choices: Choices, sampling: SamplingParams) -> Tensor:
    return _vector("finish_reason", [(choice.finish_reason or "").encode() for choice in choices])


def _indices(choices: Choices, sampling: SamplingParams) -> Tensor:
    return _vector("index", [choice.index for choice in choices])


def _ids(choices: Choices, sampling: SamplingParams) -> Tensor:
    return _vector("output_ids", [token_id for choice in choices for token_id in choice.token_ids])


def _lengths(choices: Choices, sampling: SamplingParams) -> Tensor:
    return _vector("output_lengths", [len(choice.token_ids) for choice in choices])


def _logprobs(choices: Choices, sampling: SamplingParams) -> Tensor:
    return _vector("logprobs", [entry.logprob for entry in _entries(choices)])


def _top_ids(choices: Choices, sampling: SamplingParams) -> Tensor:
    return _matrix("top_ids", sampling.logprobs or 0, [[i for i, _ in entry.top] for entry in _entries(choices)])


def _top_logprobs(choices: Choices, sampling: SamplingParams) -> Tensor:
    return _matrix("top_logprobs", sampling.logprobs or 0, [[p for _, p in entry.top] for entry in _entries(choices)])


def _entries(choices: Choices) -> list[TokenLogprob]:
    return [entry for choice in choices for entry in choice.logprobs or ()]


def _prompt_logprobs(prompt: Sequence[PromptLogprob], sampling: SamplingParams) -> Tensor:
    return _vector("prompt_logprobs", [math.nan if entry is None else entry.logprob for entry in prompt])


def _prompt_top_ids(prompt: Sequence[PromptLogprob], sampling: SamplingParams) -> Tensor:
    width = sampling.prompt_logprobs or 0
    rows = [[-1] * width if entry is None else [i for i, _ in entry.top] for entry in prompt]
    return _matrix("prompt_top_ids", width, rows)


def _prompt_top_logprobs(prompt: Sequence[PromptLogprob], sampling: SamplingParams) -> Tensor:
    width = sampling.prompt_logprobs or 0
    rows = [[math.nan] * width if entry is None else [p for _, p in entry.top] for entry in prompt]
    return _matrix("prompt_top_logprobs", width, rows)


_BUILD: Mapping[str, Callable[[Choices, SamplingParams], Tensor]] = {
    "text_output": _texts,
    "finish_reason": _reasons,
    "index": _indices,
    "output_ids": _ids,
    "output_lengths": _lengths,
    "logprobs": _logprobs,
    "top_ids": _top_ids,
    "top_logprobs": _top_logprobs,
}
_BUILD_PROMPT: Mapping[str, Callable[[Sequence[PromptLogprob], SamplingParams], Tensor]] = {
    "prompt_logprobs": _prompt_logprobs,
    "prompt_top_ids": _prompt_top_ids,
    "prompt_top_logprobs": _prompt_top_logprobs,
}


def _vector(name: str, elements: Sequence[Any]) -> Tensor:
    return Tensor(name, OUTPUTS[name][0], (len(elements),), elements)


def _matrix(name: str, width: int, rows: Sequence[Sequence[Any]]) -> Tensor:
    return Tensor(name, OUTPUTS[name][0], (len(rows), width), [element for row in rows for element in row])
