"""From chat messages to the text that the model's own template makes of them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2

from .bounded_jinja import BoundedTemplate, TemplateLimit
from .errors import CheckpointError, InvalidRequest

__all__ = ["ROLES", "ChatTemplate", "check_messages", "is_text"]

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_SECONDS = 2.0
MAX_CHARS = 16_000_000
MAX_ARGUMENT_CHARS = 256
# What a template may run into when a conversation is not what it expects.
TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled chat template; `file` is where it came from.

    Raises CheckpointError if it does not compile, or cannot be stopped within its limits on a short chat.
    """

    def __init__(self, source: str, *, file: str, special_tokens: Mapping[str, str], literal: Iterable[str]) -> None:
        try:
            self._template = BoundedTemplate(source, max_seconds=MAX_SECONDS, max_chars=MAX_CHARS)
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(f"not a valid chat template: {error}", file=file, tensor="chat_template") from error
        self._special_tokens = dict(special_tokens)
        self._literal = _starts(literal)
        self._probe(file)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, arguments: Mapping[str, Any] | None = None
    ) -> list[str]:
        """Pieces of the prompt's text, to be tokenized one by one and joined as ids.

        Messages are checked first. Usually there is one piece; text of a special token inside a message is
        divided between two, and so remains text. Raises InvalidRequest.
        """
        mark = f"\ufdd0{secrets.randbits(64)}\ufdd1"  # nobody can write it into a message beforehand
        arguments = dict(arguments or {})
        for name, value in arguments.items():
            self._check_argument(name, value)
            arguments[name] = self._break(value, mark) if isinstance(value, str) else value
        checked = [
            {key: self._break(text, mark) for key, text in message.items()} for message in check_messages(messages)
        ]
        try:
            return self._render(checked, add_generation_prompt, arguments).split(mark)
        except TemplateLimit as error:
            raise _invalid(f"rendering them was stopped: {error}", "chat_template_limit") from error
        except RecursionError as error:
            raise _invalid("the chat template recurses too deeply on them", "chat_template_limit") from error
        except TEMPLATE_FAULTS as error:
            raise _invalid(f"the model's chat template refuses them: {error}", "chat_template_refused") from error

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool, arguments: Mapping[str, Any]) -> str:
        return self._template.render(
            {
                **self._special_tokens,
                **arguments,
                "messages": messages,
                "tools": None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )

    def _probe(self, file: str) -> None:
        """A template that does not end on a short chat will end on none: say so at load."""
        try:
            self._render([{"role": "user", "content": "Hello"}], True, {})
        except (TemplateLimit, RecursionError) as error:
            raise CheckpointError(f"stopped on a short chat: {error}", file=file, tensor="chat_template") from error
        except TEMPLATE_FAULTS:
            return  # it may want a system message, or two turns: that is for the requests to find out

    def _break(self, text: str, mark: str) -> str:
        return text if self._literal is None else self._literal.sub(lambda found: found[0] + mark, text)

    def _check_argument(self, name: str, value: Any) -> None:
        given = {"messages", "tools", "documents", "add_generation_prompt", *self._special_tokens}
        accepted = sorted(self._template.variables - given)
        if name not in accepted:
            raise InvalidRequest(
                f"chat_template_kwargs: the model's template has no argument {name[:80]!r}; "
                f"it has {', '.join(accepted) or 'none'}",
                param="chat_template_kwargs",
                code="unknown_parameter",
            )
        if not isinstance(value, bool) and not (isinstance(value, str) and len(value) <= MAX_ARGUMENT_CHARS):
            raise InvalidRequest(
                f"chat_template_kwargs: {name!r} must be true, false or at most {MAX_ARGUMENT_CHARS} characters",
                param="chat_template_kwargs",
                code="invalid_value",
            )


def _starts(literal: Iterable[str]) -> re.Pattern[str] | None:
    """Matches the first character of any of these strings, wherever one stands, also inside another."""
    texts = sorted({text for text in literal if len(text) > 1})
    if not texts:
        return None
    first = "".join(sorted({re.escape(text[0]) for text in texts}))
    return re.compile(f"(?=[{first}])(?={'|'.join(map(re.escape, texts))}).", re.DOTALL)


def check_messages(messages: Any) -> list[dict[str, str]]:
    """Messages with `role`, `content` as one string and, where given, `name`. Raises InvalidRequest."""
    if not isinstance(messages, list | tuple) or not messages:
        raise _invalid("expected a list of at least one message", "invalid_value")
    return [_check_message(message, f"[{i}]") for i, message in enumerate(messages)]


def _check_message(message: Any, at: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise _invalid(f"{at} is not an object with role and content", "invalid_value")
    for key in message:
        if key not in ("role", "content", "name"):
            raise _invalid(f"{at}.{str(key)[:80]} is not supported; a message has role, content and name",
                           "unknown_parameter")  # fmt: skip
    role, name = message.get("role"), message.get("name")
    if role not in ROLES:
        raise _invalid(f"{at}.role is {_shown(role)}; expected one of {', '.join(ROLES)}", "invalid_value")
    checked = {"role": str(role), "content": _text(message.get("content"), f"{at}.content")}
    if name is not None:
        checked["name"] = _string(name, f"{at}.name")
    return checked


def _text(content: Any, at: str) -> str:
    """A string, or the joined texts of a list of text parts."""
    if not isinstance(content, list | tuple):
        return _string(content, at)
    return "".join(_part(part, f"{at}[{i}]") for i, part in enumerate(content))


def _part(part: Any, at: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or part.keys() - {"type", "text"}:
        raise _invalid(f'{at} must be {{"type": "text", "text": …}}: this model reads text only', "invalid_value")
    return _string(part.get("text"), f"{at}.text")


def _string(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise _invalid(f"{at} is {_shown(value)}; expected a string", "invalid_value")
    if not is_text(value):
        raise _invalid(f"{at} holds half of a surrogate pair, which is not text", "invalid_value")
    return value


def is_text(value: str) -> bool:
    """False if the string holds a lone surrogate, which no encoding of text can carry."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _invalid(message: str, code: str) -> InvalidRequest:
    return InvalidRequest(f"messages{'' if message.startswith('[') else ': '}{message}", param="messages", code=code)
