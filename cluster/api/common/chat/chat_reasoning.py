"""Fields of a chat that concern reasoning and the template's arguments, in the words of several servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .....replicas.text.chat.chat_template import ChatTemplate
from .....replicas.text.chat.tool_definitions import Tool
from ....request_errors import unsupported_field
from ..fields.field_schemas import EFFORTS, THINKING_TYPES, THOUGHT_LEVELS
from ..fields.json_body import invalid_value, take_field
from ..fields.unknown_fields import UnknownFieldPolicy
from ..parsers.parser_selection import NONE, detect_reasoning

_ARGUMENTS = "chat_template_kwargs"
_OFF = "none"
_SWITCH = {_OFF: False, "medium": True}  # degrees for a template that can only switch reasoning
_SWITCHES = ("enable_thinking", "thinking")  # templates' names for the switch
TemplateFor = Callable[[Sequence[Tool]], ChatTemplate | None]  # returns the model's template for chats with these tools


def read_template_arguments(
    body: dict[str, Any], template: ChatTemplate | None, unknown: UnknownFieldPolicy
) -> dict[str, Any]:
    """Return the arguments for the chat template. Raises InvalidRequest naming the field; the template checks its
    arguments itself.
    """
    return add_reasoning_effort(read_chat_template_kwargs(body, template, unknown), body, template, _ARGUMENTS)


def read_chat_template_kwargs(
    body: dict[str, Any], template: ChatTemplate | None, unknown: UnknownFieldPolicy
) -> dict[str, Any]:
    """Return the arguments of `chat_template_kwargs` that the template reads or must refuse; null counts as absent.

    Other arguments have no effect on other servers, so they count as unknown fields.
    """
    given = take_field(body, _ARGUMENTS, dict, {})
    if template is None:
        return given
    read: dict[str, Any] = {}
    for name, value in given.items():
        ours = _as_read(name, template)
        if not template.has_argument(ours) and not template.is_server_variable(name):
            unknown.meet(f"{_ARGUMENTS}.{name}", value)
        elif ours in read and read[ours] != value:
            raise invalid_value(f"{_ARGUMENTS}.{name}", value, f"no other value than {ours} has under another name")
        elif value is not None:
            read[ours] = value
    return read


def _as_read(name: str, template: ChatTemplate) -> str:
    """Return the name under which the template reads an argument: there are two names for whether to think, and it may
    have either.
    """
    if name in _SWITCHES and not template.has_argument(name):
        return next((other for other in _SWITCHES if template.has_argument(other)), name)
    return name


def add_reasoning_effort(
    arguments: Mapping[str, Any], body: dict[str, Any], template: ChatTemplate | None, field: str
) -> dict[str, Any]:
    """Return `arguments` with the reasoning effort that the body asks for. `field`: the client's name of `arguments`,
    for errors.
    """
    said = _said(body)
    if said is None:
        return dict(arguments)
    at, effort = said
    argument = _argument(at, effort, template)
    if argument is None:
        return dict(arguments)
    name, value = argument
    if arguments.get(name, value) != value:
        raise invalid_value(at, effort, f"no value beside {field}.{name}")
    return {**arguments, name: value}


def shows_reasoning(body: dict[str, Any]) -> bool:
    """Return whether the model's reasoning is part of the answer."""
    shown = take_field(body, "include_reasoning", bool, True)
    hidden = take_field(take_field(body, "reasoning", dict, {}), "exclude", bool, False, path="reasoning.")
    if hidden and body.get("include_reasoning"):
        raise invalid_value("reasoning.exclude", hidden, "no value beside include_reasoning")
    return shown and not hidden


def separates_reasoning(body: dict[str, Any]) -> bool:
    """Return whether reasoning is returned in a field of its own, not within the answer's text as the model
    wrote it.
    """
    apart = take_field(body, "separate_reasoning", bool, True)
    form = take_field(body, "reasoning_format", str, "auto")
    if form not in ("auto", "deepseek", "none"):
        raise invalid_value("reasoning_format", form, "auto, deepseek or none")
    if body.get("separate_reasoning") and form == "none":
        raise invalid_value("reasoning_format", form, "no value beside separate_reasoning")
    return apart and form != "none"


def _said(body: dict[str, Any]) -> tuple[str, str | bool] | None:
    """Return the field that states the reasoning effort best, and its value: a degree, or only whether to think. None
    if there is no such field.
    """
    best: tuple[str, str | bool] | None = None
    for at, effort in _all_said(body):
        if best is None:
            best = at, effort
        elif isinstance(effort, bool) or isinstance(best[1], bool):
            if _thinks(effort) != _thinks(best[1]):
                raise invalid_value(at, effort, f"no value beside {best[0]}")
            best = best if isinstance(effort, bool) else (at, effort)
        elif effort != best[1]:
            raise invalid_value(at, effort, f"no value beside {best[0]}")
    return best


def _all_said(body: dict[str, Any]) -> Iterator[tuple[str, str | bool]]:
    reasoning = take_field(body, "reasoning", dict, {})
    for at, fields in (("", body), ("reasoning.", reasoning)):
        name = "effort" if at else "reasoning_effort"
        if fields.get(name) is not None:
            yield at + name, _one_of(at + name, take_field(fields, name, str, "", path=at), EFFORTS)
    if reasoning.get("enabled") is not None:
        yield "reasoning.enabled", take_field(reasoning, "enabled", bool, True, path="reasoning.")
    for name in ("think", "thinking"):
        if body.get(name) is not None:
            yield from _switched(name, body[name])


def _switched(name: str, value: Any) -> Iterator[tuple[str, str | bool]]:
    """Read `think` (Ollama; may be a degree) or `thinking` (Anthropic and DeepSeek; an object that names its kind)."""
    if isinstance(value, bool):
        yield name, value
    elif name == "think":
        yield name, _one_of(name, take_field({name: value}, name, str, ""), THOUGHT_LEVELS)
    elif kind := take_field(take_field({name: value}, name, dict, {}), "type", str, "", path=f"{name}."):
        yield f"{name}.type", _one_of(f"{name}.type", kind, THINKING_TYPES) != "disabled"


def _one_of(at: str, value: str, accepted: Sequence[str]) -> str:
    if value not in accepted:
        raise invalid_value(at, value, " or ".join(accepted))
    return value


def _thinks(effort: str | bool) -> bool:
    return effort if isinstance(effort, bool) else effort != _OFF


def _argument(at: str, effort: str | bool, template: ChatTemplate | None) -> tuple[str, bool | str] | None:
    """Return the template's own name for the reasoning effort, and its value; None if the template does so in any
    case.
    """
    switch = next((name for name in _SWITCHES if template is not None and template.has_argument(name)), None)
    if template is not None and template.has_argument("reasoning_effort"):
        if not isinstance(effort, bool):
            return "reasoning_effort", effort
        if switch is None:
            return "reasoning_effort", next(word for word, thinks in _SWITCH.items() if thinks is effort)
    if switch is None:
        plain = isinstance(effort, bool) or effort == _OFF
        if template is not None and plain and _thinks(effort) == _writes_thoughts(template):
            return None
        raise unsupported_field(at, "this model's chat template knows nothing of it")
    if isinstance(effort, str) and effort not in _SWITCH:
        raise unsupported_field(at, "this model thinks or does not: give medium or none", effort)
    return switch, _thinks(effort)


def _writes_thoughts(template: ChatTemplate) -> bool:
    return detect_reasoning(template.source).name != NONE
