"""Treatment of a request's unknown fields, by `--unknown-fields`."""

from __future__ import annotations

import logging
from typing import Any, Literal

from .....replicas.short_repr import MAX_REPR_CHARS
from ....request_errors import unknown_field

log = logging.getLogger(__name__)

MAX_NAMES = 256  # different names that one process remembers, and writes a line for
# A client has no say in what separates prefix caches, nor in the template: these are refused whatever the option says.
ALWAYS_REFUSED = frozenset(
    ("block_hashes", "cache_salt", "chat_template", "extra_key", "hash_ids", "kv_hashes", "prefix_hash",
     "prefix_hashes", "prompt_hash", "tool_chat_template")
)  # fmt: skip


class UnknownFieldPolicy:
    """Unknown fields that come to one ingress. With "ignore" each name is logged once, for at most MAX_NAMES names."""

    def __init__(self, policy: Literal["ignore", "refuse"] = "ignore") -> None:
        self._policy = policy
        self._logged: set[str] = set()

    @property
    def refuses(self) -> bool:
        """Whether an unknown field is an error."""
        return self._policy == "refuse"

    def meet(self, path: str, value: Any, at: str | None = None) -> None:
        """Note the unknown field at `path`, such as `messages[].mood`. Raises InvalidRequest if it is refused.

        `at`: the same path with its indices, for the error.
        """
        if is_empty_value(value):
            return
        never = path in ALWAYS_REFUSED or path.removeprefix("parameters.") in ALWAYS_REFUSED
        if never or self._policy == "refuse":
            raise unknown_field(at or path)
        name = path[:MAX_REPR_CHARS]
        if name in self._logged or len(self._logged) > MAX_NAMES:
            return
        self._logged.add(name)
        if len(self._logged) > MAX_NAMES:
            log.warning("%d unknown fields have been logged; further ones are not", MAX_NAMES)
        else:
            log.warning(
                "a request has the unknown field %a, which is ignored (--unknown-fields refuse would refuse it)", name
            )


def is_empty_value(value: Any) -> bool:
    """Return whether a value is null or empty, which counts as leaving the field out."""
    return value is None or (isinstance(value, str | list | dict) and not value)
