"""A client's request, parsed from the wire but not yet checked against the model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ....replicas.text.chat.tool_definitions import Tool
from ....replicas.types import Pooling, Request
from .parsers.parser_selection import AnswerParserConfig
from .parsers.structural_tags import ToolSignature


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that the model is shown, and what it may do with them.

    tools     tools shown to the model; none if it may not call any
    allowed   tools that it may call
    required  whether it must call a tool
    strict    whether arguments must follow their schema
    single    whether it may make one call at most
    """

    tools: tuple[Tool, ...] = ()
    allowed: tuple[ToolSignature, ...] = ()
    required: bool = False
    strict: bool = False
    single: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool.name for tool in self.allowed)


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One prompt and how to continue it.

    model        the model name asked for; empty: the one served
    prompt       text, token ids, or the messages of a chat
    sampling     only the parameters that the client gave, by SamplingParams' names
    wire_names   Motley's name of a field -> the protocol's, where they differ: errors name the client's field
    output_ids   to resume: for each choice, the token ids received so far
    client_id    the client's own id, echoed and logged
    template_arguments   for a chat: the template's name of an argument -> a boolean or short string
    tools        for a chat: the tools that the model is shown, and what it may do with them
    parse_special   for a text: whether text that reads like a special token is one
    default_max_tokens   the protocol's default, if it has one
    pooling      if set, an embedding is wanted, and `sampling` is empty
    prompt_name  the client's name of the prompt's field, for errors
    labels       the client's own labels of its request, for the log
    add_special_tokens   for a text: whether the tokenizer's special tokens are added
    add_generation_prompt, continue_final_message   for a chat: whether the prompt begins an answer, or continues the
                  last message
    truncate      most tokens of the prompt to keep; -1: as many as leave space for the answer; None: a prompt that
                  is too long is refused
    truncate_end  whether the prompt's end is cut off, not its beginning
    prompt_shown   how often the answer has its prompt's log-probabilities; None: in each of the n choices
    """

    model: str
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]
    chat: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    wire_names: Mapping[str, str] = field(default_factory=dict)
    output_ids: Sequence[Sequence[int]] = ()
    client_id: str = ""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    tools: ToolUse = field(default_factory=ToolUse)
    timeout_s: float | None = None
    priority: int = 0
    parse_special: bool = True
    default_max_tokens: int | None = None
    pooling: Pooling | None = None
    prompt_name: str = "prompt"
    labels: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    truncate: int | None = None
    truncate_end: bool = False
    prompt_shown: int | None = 1

    def times_shown(self, n: int) -> int:
        return n if self.prompt_shown is None else self.prompt_shown


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A validated request, and what its answer needs besides."""

    request: Request
    parsed: ParsedRequest
    model: str
    created: int  # Unix seconds
    admitted_s: float = field(default_factory=time.monotonic)
    prompt_is_cut: bool = False  # the request has only one end of what the client gave
    reading: AnswerParserConfig | None = None  # how a chat's answers are split into text, reasoning and calls

    @property
    def prompt_shown(self) -> int:
        return self.parsed.times_shown(self.request.sampling.n)

    def now(self) -> Request:
        """Return the request with the time that is left of its deadline, since other prompts of its call were read
        meanwhile.
        """
        request = self.request
        if request.deadline_s is None:
            return request
        return replace(request, deadline_s=request.deadline_s - (time.monotonic() - self.admitted_s))


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits on a body: number of values of any kind, and of members of objects; lists and objects are limited as
    members.
    """

    values: int
    members: int
