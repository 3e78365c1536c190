"""Names of speakers that the model's chat template cannot show: they are dropped, as other servers do."""

from __future__ import annotations

from typing import Any

from .....replicas.text.chat.chat_template import ChatTemplate
from ..fields.unknown_fields import UnknownFieldPolicy

_NAME = "messages[].name"


def drop_unplaced_names(messages: Any, template: ChatTemplate | None, unknown: UnknownFieldPolicy) -> Any:
    """Return the messages without the names that the template would not show; each counts as an unknown field.

    Some clients name every speaker. Where unknown fields are refused the names stay, and the template refuses them.
    A value that is no list of messages is returned as it is, since a later check refuses it.
    """
    if template is None or template.takes_names or unknown.refuses or not isinstance(messages, list):
        return messages
    return [_without_name(message, unknown, f"messages[{index}].name") for index, message in enumerate(messages)]


def _without_name(message: Any, unknown: UnknownFieldPolicy, at: str) -> Any:
    """Return the message without its name. A tool's name stays: it says which tool answered, and templates may read it
    or not.
    """
    if not isinstance(message, dict) or message.get("role") == "tool" or not isinstance(message.get("name"), str):
        return message
    unknown.meet(_NAME, message["name"], at)
    return {key: value for key, value in message.items() if key != "name"}
