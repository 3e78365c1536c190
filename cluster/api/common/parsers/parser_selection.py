"""Choice of the formats in which a model writes tool calls and reasoning, from its chat template or the operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .....replicas.text.tokenizer.tokenizer import Tokenizer
from ....service_errors import ConfigurationError
from . import hermes_tool_calls, llama_tool_calls, reasoning_parser
from .answer_parser import AnswerParser, ToolParser
from .structural_tags import TagFormat, ToolSignature

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
    required: Callable[..., TagFormat]
    optional: Callable[[Sequence[ToolSignature]], TagFormat] | None = None


TOOL_PARSERS: Mapping[str, ToolStyle] = {
    "hermes": ToolStyle(
        hermes_tool_calls.HermesParser, hermes_tool_calls.required_calls_format, hermes_tool_calls.optional_calls_format
    ),
    "llama3_json": ToolStyle(llama_tool_calls.LlamaParser, llama_tool_calls.required_calls_format),
}


@dataclass(frozen=True, slots=True)
class ParserChoice:
    """A parser's name, or none, and the reason for the choice."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelOutputStyles:
    """Formats of the served model's answers."""

    tools: ParserChoice = ParserChoice(NONE, "not chosen")
    reasoning: ParserChoice = ParserChoice(NONE, "not chosen")

    @property
    def thinks(self) -> bool:
        return self.reasoning.name != NONE


def choose_styles(
    source: str | None, tools: str = AUTO, reasoning: str = AUTO, *, with_tools: str | None = None
) -> ModelOutputStyles:
    """Choose the parsers for the chat template `source`, and `with_tools` if chats with tools have one of their own.

    Raises ConfigurationError for an unknown parser name.
    """
    check_parser_names(tools, reasoning)
    reasons = "--tool-parser asks for it", "--reasoning-parser asks for it"
    return ModelOutputStyles(
        detect_tools(with_tools or source or "") if tools == AUTO else ParserChoice(tools, reasons[0]),
        detect_reasoning((source or "") + (with_tools or ""))
        if reasoning == AUTO
        else ParserChoice(reasoning, reasons[1]),
    )


def check_parser_names(tools: str, reasoning: str) -> None:
    """Raise ConfigurationError, naming the flag, for an unknown parser name."""
    _check("--tool-parser", tools, TOOL_PARSERS)
    _check("--reasoning-parser", reasoning, REASONING_PARSERS)


def detect_tools(source: str) -> ParserChoice:
    if hermes_tool_calls.OPEN in source and "<function=" not in source:
        return ParserChoice("hermes", f"the chat template writes calls in {hermes_tool_calls.OPEN}")
    if "<|start_header_id|>" in source and "tools" in source and '"parameters"' in source:
        return ParserChoice("llama3_json", "the chat template is Llama 3's, with tools and their parameters")
    return ParserChoice(NONE, "the chat template shows no style of calls that is known here")


def detect_reasoning(source: str) -> ParserChoice:
    if reasoning_parser.CLOSE in source:
        return ParserChoice("qwen3", f"the chat template knows {reasoning_parser.CLOSE}")
    return ParserChoice(NONE, f"the chat template does not know {reasoning_parser.CLOSE}")


def _check(flag: str, name: str, supported: Sequence[str] | Mapping[str, object]) -> None:
    accepted = (AUTO, NONE, *supported)
    if name not in accepted:
        raise ConfigurationError(f"{flag} {name}: expected one of {', '.join(accepted)}", param=flag)


@dataclass(frozen=True, slots=True)
class AnswerParserConfig:
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
        return AnswerParser(reasoning_parser.ReasoningParser(opened=self.opened) if self.thinks else None, tools)

    def counter(self) -> reasoning_parser.ReasoningTokenCounter | None:
        return reasoning_parser.ReasoningTokenCounter(opened=self.opened) if self.thinks else None


ReasoningState = Literal["free", "opened", "closed"]


def reasoning_state(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> ReasoningState:
    """Return whether the prompt ends within reasoning ("opened"), after it ("closed") or leaves it open ("free")."""
    tail = tokenizer.decode(prompt_ids[-PROMPT_TAIL:], skip_special_tokens=False).rstrip()
    if tail.endswith(reasoning_parser.OPEN):
        return "opened"
    return "closed" if tail.endswith(reasoning_parser.CLOSE) else "free"
