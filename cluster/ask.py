"""What a client asked for, read from the wire but not yet checked against the model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..replicas.protocol import Pooling, Request
from ..replicas.tools import Tool


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt and how to continue it.

    model        the name asked for; empty takes the one served
    prompt       text, token ids, or the messages of a chat
    sampling     only what the client gave, by SamplingParams' names
    wire_names   our name of a field -> the protocol's, where they differ: errors name the client's field
    output_ids   resume: per choice, the ids received so far
    client_id    the client's own id, echoed and logged
    template_arguments   of a chat: what the model's template calls them -> a boolean or short string
    tools        of a chat: what the model is told that it may call
    parse_special   of a text: what reads like a special token is one
    default_max_tokens   the protocol's, where it has one
    pooling      set: an embedding is wanted, and `sampling` is empty
    prompt_name  what the client calls the prompt: errors name it
    labels       what the client calls its request: logged
    add_special_tokens   of a text: those that the tokenizer adds are added
    add_generation_prompt, continue_final_message   of a chat: the prompt begins an answer, or goes on with the last one
    truncate      at most so many tokens of the prompt are kept; -1: as many as leave room for the answer; None: what
                  is too long is refused
    truncate_end  it is the prompt's end that is cut off, not its beginning
    prompt_shown   times that the answer has the log-probabilities of its prompt; None: in each of the n choices
    """

    model: str
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]
    chat: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    wire_names: Mapping[str, str] = field(default_factory=dict)
    output_ids: Sequence[Sequence[int]] = ()
    client_id: str = ""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Tool] = ()
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
class Admitted:
    """A validated request, and what its answer needs besides."""

    request: Request
    ask: Ask
    model: str
    created: int  # Unix seconds
    admitted_s: float = field(default_factory=time.monotonic)
    prompt_is_cut: bool = False  # the request has only one end of what the client gave

    @property
    def prompt_shown(self) -> int:
        return self.ask.times_shown(self.request.sampling.n)

    def now(self) -> Request:
        """With what is left of its deadline: others of its call were read since."""
        request = self.request
        if request.deadline_s is None:
            return request
        return replace(request, deadline_s=request.deadline_s - (time.monotonic() - self.admitted_s))


@dataclass(frozen=True, slots=True)
class Most:
    """What a body may hold: values of any kind, and of those members of objects; as many lists and objects again."""

    values: int
    members: int
