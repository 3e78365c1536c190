"""Reuse and sharing of prompt prefixes in a fleet file."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from ...prefix_store.redis_source import EMBEDDED, MEMORY, OFF, check_store
from ...service_errors import ConfigurationError
from .value_types import Count, FilePath, Positive, Size, Spec, Text, spec_error


class PrefixCacheSpec(Spec):
    """Reuse and sharing of prompt prefixes, and where they are stored."""

    reuse: bool = True
    """Reuse the KV of earlier requests for prompts that begin with the same tokens."""
    store: Text = EMBEDDED
    """Store through which replicas share prefixes. embedded: a Redis or Valkey of the service's own; redis://,
    rediss:// or unix://: one that runs already; memory: not shared, each replica keeps its own in the host's memory;
    off: none."""
    memory: Size = 1 << 30
    """Maximum memory of the service's own Redis or, with `store: memory`, of each replica."""
    ttl_s: Positive = 3600.0
    """Seconds for which Redis keeps a prefix, give or take a tenth."""
    tenant_memory: Size | None = None
    """Most bytes that one tenant may write to Redis within `ttl_s` seconds."""
    secret: FilePath | None = None
    """File with a secret of 32 bytes or more that several services have in common to share prefixes; by default each
    service only shares within itself."""
    wire: Literal["auto", "int8", "float16", "bfloat16"] = "auto"
    """Data type in which the whole fleet stores KV; values are rounded where it is smaller than theirs. auto: as
    replicas have them; with any_numerics bfloat16 if each pool runs on a CPU or on GPUs of compute capability 8.0 or
    above, float16 if one may be below. KV in int8 is always stored as int8."""
    after: Count = 2
    """Number of requests with a prefix after which it is stored."""
    any_numerics: bool = False
    """Let pools share prefixes whatever their numerics and GPUs: last digits of results may then differ, and so
    tokens."""

    @property
    def used(self) -> bool:
        return self.reuse and self.store != OFF

    @property
    def shared(self) -> bool:
        """Whether replicas read what others have computed."""
        return self.used and self.store != MEMORY

    @property
    def live(self) -> frozenset[str]:
        """Entries that change without a new replica: memory, unless it belongs to each replica."""
        return frozenset() if self.store == MEMORY else frozenset({"memory"})

    @field_validator("store")
    @classmethod
    def _check_known(cls, value: str) -> str:
        try:
            check_store(value)
        except ConfigurationError as error:
            raise spec_error(error.message) from None
        return value

    @field_validator("memory", "tenant_memory")
    @classmethod
    def _some(cls, value: int | None) -> int | None:
        if value == 0:
            raise spec_error("0 is not accepted; expected more than 0; `store: off` keeps nothing")
        return value
