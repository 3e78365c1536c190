"""`reasoning_effort` and arguments of the template: what a chat says to the model's template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...replicas.chat_template import ChatTemplate
from ...replicas.tools import Tool
from ..errors import unsupported_field
from .openai_fields import take, wrong_type
from .openai_schemas import EFFORTS

_SWITCH = {"none": False, "medium": True}  # a template that can only think or not knows no other degrees
TemplateFor = Callable[[Sequence[Tool]], ChatTemplate | None]  # the model's, for chats with these tools


def template_arguments(body: dict[str, Any], template: ChatTemplate | None) -> dict[str, Any]:
    """Raises InvalidRequest naming the field; the template checks its arguments itself."""
    return with_effort(take(body, "chat_template_kwargs", dict, {}), body, template, "chat_template_kwargs")


def with_effort(
    arguments: Mapping[str, Any], body: dict[str, Any], template: ChatTemplate | None, field: str
) -> dict[str, Any]:
    """`arguments`, which the client calls `field`, and what `reasoning_effort` of the body is among them."""
    effort = take(body, "reasoning_effort", str, "")
    if body.get("reasoning_effort") is None:
        return dict(arguments)
    if effort not in EFFORTS:
        raise wrong_type("reasoning_effort", effort, " or ".join(EFFORTS))
    name, value = _argument(effort, template)
    if name in arguments:
        raise wrong_type("reasoning_effort", effort, f"no value beside {field}.{name}")
    return {**arguments, name: value}


def _argument(effort: str, template: ChatTemplate | None) -> tuple[str, bool | str]:
    """What the template calls it, and its value."""
    if template is not None and template.has_argument("reasoning_effort"):
        return "reasoning_effort", effort
    if template is None or not template.has_argument("enable_thinking"):
        raise unsupported_field("reasoning_effort", "this model's chat template knows nothing of it")
    if effort not in _SWITCH:
        raise unsupported_field("reasoning_effort", "this model thinks or does not: give medium or none", effort)
    return "enable_thinking", _SWITCH[effort]
