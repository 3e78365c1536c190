"""Conversion of Python arguments to requests of motley.v1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from ..cluster.protos import inference_pb2 as pb
from ..replicas.errors import InvalidRequest
from ..replicas.short_repr import short_repr
from .build import blame_parameter, build_message
from .tools import Message, Tool, ToolChoice, chat_messages, tool_choice_message, tool_messages

Prompt = str | Sequence[int]
GenerateRequest = pb.CompleteRequest | pb.ChatRequest
_POOLING = {"last": pb.POOLING_LAST, "mean": pb.POOLING_MEAN}


class Sampling(TypedDict, total=False):
    """Fields of motley.v1.SamplingParams; a field that is left out takes the model's default."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    n: int
    logprobs: int
    prompt_logprobs: int
    min_tokens: int
    max_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    grammar: Mapping[str, Any]  # a field of motley.v1.Grammar: {"regex": …}, {"json_schema": JSON text}


class CallOptions(Sampling, total=False):
    """Sampling parameters, and options of the call.

    model       model name; empty: the one served
    request_id  the client's own id, echoed and logged
    timeout_s   seconds for the whole call, with all attempts and the waits between them
    priority    higher runs first
    """

    model: str
    request_id: str
    timeout_s: float | None
    priority: int


class ChatOptions(CallOptions, total=False):
    """Options of a call, and those of a conversation, in OpenAI's shape.

    tools                functions that the model may call
    tool_choice          auto, none, required, or an object that names some; default: auto if there are tools
    parallel_tool_calls  False: one call at most
    reasoning_effort     reasoning effort, as far as the model's template has it
    """

    tools: Sequence[Tool]
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool
    reasoning_effort: str


def complete_request(prompt: Prompt, options: CallOptions | Mapping[str, Any] | None = None) -> pb.CompleteRequest:
    """Return the request of a completion. Raises InvalidRequest naming the field for a value that protobuf cannot
    carry.
    """
    return build_message(pb.CompleteRequest, _prompt("prompt", prompt) | _fields(options or {}))


def chat_request(
    messages: Sequence[Message],
    options: ChatOptions | Mapping[str, Any] | None = None,
    template_arguments: Mapping[str, bool | str] | None = None,
) -> pb.ChatRequest:
    """Return the request of a chat. `template_arguments`: only those that the model's chat template names.

    Raises InvalidRequest naming the field for a value that protobuf cannot carry.
    """
    rest = dict(options or {})
    fields = {
        "messages": chat_messages(messages),
        "template_arguments": _template_arguments(template_arguments or {}),
        "tools": tool_messages(rest.pop("tools", None)),
        "tool_choice": tool_choice_message(rest.pop("tool_choice", None)),
        "parallel_tool_calls": rest.pop("parallel_tool_calls", None),
        "reasoning_effort": rest.pop("reasoning_effort", None),
    }
    return build_message(pb.ChatRequest, fields | _fields(rest))


def tokenize_request(text: str) -> pb.TokenizeRequest:
    return build_message(pb.TokenizeRequest, {"text": text})


def detokenize_request(token_ids: Sequence[int]) -> pb.DetokenizeRequest:
    return build_message(pb.DetokenizeRequest, {"token_ids": token_ids})


def embeddings_request(
    prompts: Sequence[Prompt], pooling: Literal["last", "mean"], *, normalize: bool
) -> pb.EmbeddingsRequest:
    """Return the request of embeddings of texts or token ids; `pooling` is over their last hidden states."""
    with blame_parameter("inputs", prompts):
        inputs = [pb.EmbeddingInput(**_prompt(f"inputs[{index}]", prompt)) for index, prompt in enumerate(prompts)]
    if pooling not in tuple(_POOLING):  # a tuple, as the value may not be hashable
        raise InvalidRequest(f"pooling: {short_repr(pooling)} is not accepted; expected last or mean", param="pooling")
    return build_message(pb.EmbeddingsRequest, {"inputs": inputs, "pooling": _POOLING[pooling], "normalize": normalize})


def _prompt(param: str, prompt: Prompt) -> dict[str, Any]:
    """Return the prompt as the field to set. It is built here, so that an error has this field's name."""
    with blame_parameter(param, prompt):
        if isinstance(prompt, str):
            return {"text": pb.EmbeddingInput(text=prompt).text}
        if isinstance(prompt, bytes | bytearray):  # a sequence of numbers, but not of token ids
            raise TypeError("expected text or token ids")
        return {"token_ids": pb.TokenIds(ids=prompt)}


def _template_arguments(given: Mapping[str, bool | str]) -> dict[str, pb.TemplateArgument]:
    arguments = {}
    for name, value in given.items():
        with blame_parameter(f"template_arguments.{name}", value):
            arguments[name] = (
                pb.TemplateArgument(flag=value) if isinstance(value, bool) else pb.TemplateArgument(text=value)
            )
    return arguments


def _fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request's own fields, and the other options as its sampling. A single stop string becomes a list
    of one.
    """
    sampling = {name: value for name, value in options.items() if value is not None}
    own = {name: sampling.pop(name) for name in ("model", "request_id", "timeout_s", "priority") if name in sampling}
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = [sampling["stop"]]
    return own | {"sampling": build_message(pb.SamplingParams, sampling)}
