"""Chat template of a model: turns chat messages into the text of a prompt."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2

from ...errors import CheckpointError, InvalidRequest
from ..jinja.bounded_template import COMPILE_FAULTS, BoundedTemplate, TemplateLimit, TemplateTimeout
from ..special_token_search import special_token_starts
from .chat_messages import Message, check_messages
from .tool_definitions import Tool

MAX_SECONDS = 2.0
MAX_CHARS = 16_000_000
MAX_ARGUMENT_CHARS = 256
MAX_SHOWN = 500  # most characters that are shown of a template's own error message
# Errors that a template may run into when a conversation is not what it expects.
TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)

PROBE = "motley-probe"  # text that shows which parts of a conversation a template renders
_SERVER_VARIABLES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
)
_NAMED_TOKENS = frozenset(  # reserved whether or not this tokenizer has them
    ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token",
     "additional_special_tokens", "extra_special_tokens")
)  # fmt: skip
_PROBE_TOOL = {"type": "function", "function": {"name": PROBE, "description": "", "parameters": {}}}


class ChatTemplate:
    """A compiled chat template; `file` is where it came from.

    quick_s: seconds of CPU time after which `render` raises TemplateTimeout, where another process then renders with
    more time; None: rendering takes as long as the usual limit allows.

    Raises CheckpointError if it does not compile, or cannot be stopped within its limits on a short chat.
    """

    def __init__(
        self,
        source: str,
        *,
        file: str,
        special_tokens: Mapping[str, str],
        literal: Iterable[str],
        own_process: bool = True,
    ) -> None:
        self.source = source
        self.quick_s: float | None = None
        try:
            self._template = BoundedTemplate(
                source, max_seconds=MAX_SECONDS, max_chars=MAX_CHARS, own_process=own_process
            )
        except COMPILE_FAULTS as error:
            raise CheckpointError(f"not a valid chat template: {error}", file=file, tensor="chat_template") from error
        self._special_tokens = dict(special_tokens)
        self._literal = special_token_starts(literal)
        self._given = _SERVER_VARIABLES | set(special_tokens)
        self._arguments = sorted(self._template.variables - self._given)
        self._probe(file)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
        continue_final_message: bool = False,
    ) -> list[str]:
        """Return pieces of the prompt's text, to be tokenized one by one and joined as ids.

        `continue_final_message`: the text ends where the last message's content does, for the model to continue it.

        Messages are checked first; `tools` are as `check_tools` returns them. Usually there is one piece; the text of a
        special token in what the client wrote is divided between two, and so remains text. Raises InvalidRequest.
        """
        try:
            return self._pieces(messages, add_generation_prompt, arguments or {}, tools, continue_final_message)
        except TemplateLimit as error:
            if isinstance(error, TemplateTimeout) and self.quick_s is not None:
                raise
            raise _invalid(f"rendering them was stopped: {error}", "chat_template_limit") from error
        except RecursionError as error:
            raise _invalid("the chat template recurses too deeply on them", "chat_template_limit") from error

    def _pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        arguments: Mapping[str, Any],
        tools: Sequence[Tool],
        continue_final_message: bool,
    ) -> list[str]:
        mark = f"\ufdd0{secrets.randbits(64)}\ufdd1"  # random, so that no client can put it into a message
        for name, value in arguments.items():
            self._check_argument(name, value)
        if tools and not self.takes_tools:
            raise _unsupported("tools", "the model's chat template has no place for them")
        checked = [one for i, message in enumerate(check_messages(messages))
                   for one in self._placed(message, f"messages[{i}]")]  # fmt: skip
        end = f"\ufdd2{secrets.randbits(64)}\ufdd3"
        if continue_final_message:
            checked[-1] = _with_open_end(checked[-1], end, add_generation_prompt=add_generation_prompt)
        try:
            checked, tools, arguments = self._break([checked, list(tools), dict(arguments)], mark)
            text = self._render(checked, add_generation_prompt, arguments, tools)
        except TemplateLimit:
            raise
        except TEMPLATE_FAULTS as error:
            raise _invalid(
                f"the model's chat template refuses them: {str(error)[:MAX_SHOWN]}", "chat_template_refused"
            ) from error
        if continue_final_message:
            text, found, _ = text.rpartition(end)
            if not found:
                message = "the model's chat template does not show the last message as it is, so it cannot be continued"
                raise _unsupported("continue_final_message", message)
        return re.split(f"{mark}|{re.escape(json.dumps(mark)[1:-1])}", text)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the chat template makes descriptions of tools part of the prompt."""
        return self._shows([{"role": "user", "content": "Hello"}], [_PROBE_TOOL])

    @cached_property
    def _takes_calls(self) -> bool:
        return self._shows(_with_result(PROBE, "x"), [])

    @cached_property
    def _takes_content_beside_calls(self) -> bool:
        return self._shows(_with_result("f", "x", PROBE), [])

    @cached_property
    def _takes_content_before_calls(self) -> bool:
        """Whether an assistant's text may stand as a message of its own before its tool calls. Some templates want
        roles to alternate.
        """
        user, call, result = _with_result("f", "x")
        before_call, after_result = ({"role": "assistant", "content": text} for text in (PROBE, "x"))
        return self._shows([user, before_call, call, result, after_result, user], [])

    @cached_property
    def _takes_results(self) -> bool:
        return self._shows(_with_result("f", PROBE), [])

    @cached_property
    def takes_names(self) -> bool:
        return self._shows([{"role": "user", "content": "Hello", "name": PROBE}], [])

    @cached_property
    def _takes_developer(self) -> bool:
        return self._shows([{"role": "developer", "content": PROBE}, {"role": "user", "content": "Hello"}], [])

    def text_after_generation(self) -> str:
        """Return the text that the template writes behind an assistant's turn; empty if the template writes no such
        turns.
        """
        chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": PROBE}]
        try:
            return self._render(chat, False, {}).partition(PROBE)[2]
        except (RecursionError, *TEMPLATE_FAULTS):
            return ""

    def rest(self) -> None:
        """End the processes that render it, until it is rendered again."""
        self._template.rest()

    def has_argument(self, name: str) -> bool:
        """Return whether the template reads this variable, beside those that every template is given."""
        return name in self._arguments

    def is_server_variable(self, name: str) -> bool:
        """Return whether the server sets this variable, so that a client may not."""
        return name in self._given or name in _NAMED_TOKENS

    def _shows(self, messages: list[Message], tools: list[Tool]) -> bool:
        try:
            return PROBE in self._render(messages, True, {}, tools)
        except TemplateLimit:  # a limit does not tell whether the template shows the message
            raise
        except TEMPLATE_FAULTS:
            return False

    def _placed(self, message: Message, at: str) -> list[Message]:
        """Return the messages that a checked message is rendered as. Raises InvalidRequest for a part of it that the
        template would leave out, so that nothing goes unseen.

        Text beside tool calls, which models write and clients send back, is not refused: where the template has no
        place for it, it becomes a message before the calls; and where the template does not accept that either, it is
        left out.
        """
        if message["role"] == "developer" and not self._takes_developer:
            return [{**message, "role": "system"}]  # the newer name of the same role
        if message["role"] == "tool" and not self._takes_results:
            raise _unsupported(f"{at}.role", "the model's chat template has no place for results of tools")
        if "tool_calls" in message and not self._takes_calls:
            raise _unsupported(f"{at}.tool_calls", "the model's chat template has no place for calls of tools")
        if "name" in message and message["role"] != "tool" and not self.takes_names:
            raise _unsupported(f"{at}.name", "the model's chat template has no place for names")
        if "tool_calls" in message and message["content"].strip() and not self._takes_content_beside_calls:
            said = {name: value for name, value in message.items() if name != "tool_calls"}
            called = {name: value for name, value in message.items() if name != "reasoning_content"} | {"content": ""}
            return [said, called] if self._takes_content_before_calls else [called]
        return [message]

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        arguments: Mapping[str, Any],
        tools: Sequence[Tool] = (),
    ) -> str:
        return self._template.render(
            {
                **self._special_tokens,
                **arguments,
                "messages": messages,
                "tools": tools or None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            },
            self.quick_s,
        )

    def _probe(self, file: str) -> None:
        """Raise CheckpointError if the template does not end on a short chat, since it will then end on none."""
        try:
            self._render([{"role": "user", "content": "Hello"}], True, {})
        except (TemplateLimit, RecursionError) as error:
            raise CheckpointError(
                f"exceeds a limit on a chat of one short message, as it would on any: {error}",
                file=file,
                tensor="chat_template",
            ) from error
        except TEMPLATE_FAULTS:
            return  # the template may need a system message or two turns; requests without them get the error

    def _break(self, value: Any, mark: str) -> Any:
        """Return the same value with a mark inside the text of every special token, so that a client's text never
        becomes one.
        """
        if self._literal is None:
            return value
        if isinstance(value, str):
            return self._literal.sub(lambda found: found[0] + mark, value)
        if isinstance(value, list):
            return [self._break(item, mark) for item in value]
        if isinstance(value, Mapping):
            return {self._break(key, mark): self._break(item, mark) for key, item in value.items()}
        return value

    def _check_argument(self, name: str, value: Any) -> None:
        if name not in self._arguments:
            raise InvalidRequest(
                f"chat_template_kwargs: the model's template has no argument {name[:80]!r}; "
                f"it has {', '.join(self._arguments) or 'none'}",
                param="chat_template_kwargs",
                code="unknown_parameter",
            )
        if not isinstance(value, bool) and not (isinstance(value, str) and len(value) <= MAX_ARGUMENT_CHARS):
            raise InvalidRequest(
                f"chat_template_kwargs: {name!r} must be true, false or at most {MAX_ARGUMENT_CHARS} characters",
                param="chat_template_kwargs",
                code="invalid_value",
            )


def _with_open_end(message: Message, end: str, *, add_generation_prompt: bool) -> Message:
    """Return the message with `end` behind its content. Raises InvalidRequest unless the message can be continued."""
    if add_generation_prompt:
        raise _cannot_continue("no value beside add_generation_prompt, whose default is true: give false there")
    if message["role"] != "assistant" or "tool_calls" in message:
        raise _cannot_continue("a last message of role assistant without tool_calls")
    return {**message, "content": message["content"] + end}


def _cannot_continue(expected: str) -> InvalidRequest:
    message = f"continue_final_message: true is not accepted; expected {expected}"
    return InvalidRequest(message, param="continue_final_message", code="invalid_value")


def _with_result(name: str, result: str, beside: str = "") -> list[Message]:
    function = {"name": name, "arguments": {}}
    return [
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": beside,
            "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
        },
        {"role": "tool", "content": result, "name": name, "tool_call_id": "call00001"},
    ]


def _invalid(message: str, code: str) -> InvalidRequest:
    return InvalidRequest(f"messages: {message}", param="messages", code=code)


def _unsupported(at: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{at}: {message}", param=at, code="unsupported_parameter")
