"""How a model writes calls and reasoning, told from its chat template unless the operator says it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ...replicas.tokenizer import Tokenizer
from ..failures import ConfigurationError
from . import hermes, llama, think
from .answer import AnswerParser, ToolParser
from .tags import Format, Signature

AUTO, NONE = "auto", "none"
REASONING_PARSERS = ("qwen3",)
PROMPT_TAIL = 16  # tokens in which `<think>` and line ends behind it find room


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """One way to write calls.

    required   what a text of calls looks like
    optional   what a text looks like in which there may be calls; None: it cannot be said
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
    """A parser's name, or none, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Styles:
    """What the served model's answers are made of."""

    tools: Choice = Choice(NONE, "not chosen")
    reasoning: Choice = Choice(NONE, "not chosen")

    @property
    def thinks(self) -> bool:
        return self.reasoning.name != NONE


def choose(source: str | None, tools: str = AUTO, reasoning: str = AUTO, *, with_tools: str | None = None) -> Styles:
    """For the chat template `source`, and `with_tools` where chats with tools have one of their own.

    Raises ConfigurationError for a name that is no parser's.
    """
    check_names(tools, reasoning)
    asked = "--tool-parser asks for it", "--reasoning-parser asks for it"
    return Styles(
        detect_tools(with_tools or source or "") if tools == AUTO else Choice(tools, asked[0]),
        detect_reasoning((source or "") + (with_tools or "")) if reasoning == AUTO else Choice(reasoning, asked[1]),
    )


def check_names(tools: str, reasoning: str) -> None:
    """Raises ConfigurationError naming the flag."""
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
    """How one chat's answers are to be taken apart.

    tools    class of the parser of calls, None where none are to be found
    names    tools that may be called
    single   one call at most
    thinks   look for reasoning; `opened`: the prompt has begun it
    required the text behind reasoning is held to be calls
    """

    tools: type[ToolParser] | None = None
    names: tuple[str, ...] = ()
    single: bool = False
    thinks: bool = False
    opened: bool = False
    required: bool = False

    def parser(self) -> AnswerParser | None:
        """A new one for one choice; None where all is text."""
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
    """Whether the prompt ends within reasoning, behind it, or leaves it to the model."""
    tail = tokenizer.decode(prompt_ids[-PROMPT_TAIL:], skip_special_tokens=False).rstrip()
    if tail.endswith(think.OPEN):
        return "opened"
    return "closed" if tail.endswith(think.CLOSE) else "free"
