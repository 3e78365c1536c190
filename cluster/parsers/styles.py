"""Choice of the formats in which a model writes tool calls and reasoning, from its chat template or the operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ...replicas.text.tokenizer.tokenizer import Tokenizer
from ..failures import ConfigurationError
from . import hermes, llama, think
from .answer import AnswerParser, ToolParser
from .tags import Format, Signature

AUTO, NONE = "auto", "none"
REASONING_PARSERS = ("qwen3",)
PROMPT_TAIL = 16  # tokens at the end of a prompt, enough for `<think>` and line ends behind it


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """A format of tool calls.

    parser    parses it
    required  returns the format of a text that consists of calls
    optional  returns the format of a text that may contain calls; None: it cannot be described
    """

    parser: type[ToolParser]
    required: Callable[..., Format]
    optional: Callable[[Sequence[Signature]], Format] | None = None


TOOL_PARSERS: Mapping[str, ToolStyle] = {
    "hermes": ToolStyle(hermes.HermesParser, hermes.required, hermes.optional),
    "llama3_json": ToolStyle(llama.LlamaParser, llama.required),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A parser's name, or none, and the reason for the choice."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Styles:
    """Formats of the served model's answers."""

    tools: Choice = Choice(NONE, "not chosen")
    reasoning: Choice = Choice(NONE, "not chosen")

    @property
    def thinks(self) -> bool:
        return self.reasoning.name != NONE


def choose(source: str | None, tools: str = AUTO, reasoning: str = AUTO, *, with_tools: str | None = None) -> Styles:
    """Choose the parsers for the chat template `source`, and `with_tools` if chats with tools have one of their own.

    Raises ConfigurationError for an unknown parser name.
    """
    check_names(tools, reasoning)
    asked = "--tool-parser asks for it", "--reasoning-parser asks for it"
    return Styles(
        detect_tools(with_tools or source or "") if tools == AUTO else Choice(tools, asked[0]),
        detect_reasoning((source or "") + (with_tools or "")) if reasoning == AUTO else Choice(reasoning, asked[1]),
    )


def check_names(tools: str, reasoning: str) -> None:
    """Raise ConfigurationError, naming the flag, for an unknown parser name."""
    _check("--tool-parser", tools, TOOL_PARSERS)
    _check("--reasoning-parser", reasoning, REASONING_PARSERS)


def detect_tools(source: str) -> Choice:
    if hermes.OPEN in source and "<function=" not in source:
        return Choice("hermes", f"the chat template writes calls in {hermes.OPEN}")
    if "<|start_header_id|>" in source and "tools" in source and '"parameters"' in source:
        return Choice("llama3_json", "the chat template is Llama 3's, with tools and their parameters")
    return Choice(NONE, "the chat template shows no style of calls that is known here")


def detect_reasoning(source: str) -> Choice:
    if think.CLOSE in source:
        return Choice("qwen3", f"the chat template knows {think.CLOSE}")
    return Choice(NONE, f"the chat template does not know {think.CLOSE}")


def _check(flag: str, name: str, known: Sequence[str] | Mapping[str, object]) -> None:
    accepted = (AUTO, NONE, *known)
    if name not in accepted:
        raise ConfigurationError(f"{flag} {name}: expected one of {', '.join(accepted)}", param=flag)


@dataclass(frozen=True, slots=True)
class Reading:
    """Plan for parsing one chat's answers.

    tools     class of the tool call parser; None: there are no calls to find
    names     tools that may be called
    single    at most one call
    thinks    look for reasoning
    opened    the prompt has begun the reasoning
    required  the text after the reasoning is constrained to calls
    """

    tools: type[ToolParser] | None = None
    names: tuple[str, ...] = ()
    single: bool = False
    thinks: bool = False
    opened: bool = False
    required: bool = False

    def parser(self) -> AnswerParser | None:
        """Return a new parser for one choice; None if all is text."""
        if self.tools is None and not self.thinks:
            return None
        tools = None
        if self.tools is not None:
            tools = self.tools(self.names, single=self.single, required=self.required)
        return AnswerParser(think.ThinkParser(opened=self.opened) if self.thinks else None, tools)

    def counter(self) -> think.ThinkCounter | None:
        return think.ThinkCounter(opened=self.opened) if self.thinks else None


Thinking = Literal["free", "opened", "closed"]


def thinking(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> Thinking:
    """Return whether the prompt ends within reasoning ("opened"), after it ("closed") or leaves it open ("free")."""
    tail = tokenizer.decode(prompt_ids[-PROMPT_TAIL:], skip_special_tokens=False).rstrip()
    if tail.endswith(think.OPEN):
        return "opened"
    return "closed" if tail.endswith(think.CLOSE) else "free"
