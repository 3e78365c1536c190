"""Who may come in by the ingress, and what is noted of them: its settings, as they travel to its process."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from .auth.guard import Guard
from .auth.key_file import KeyFile
from .auth.keys import StoredKey
from .routing.resume import ResumePolicy
from .routing.waiting import Routing
from .web.readers import READER_TIMEOUT_S

OWN_TENANT = "_motley"  # no name that a key file may hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """Settings of an ingress's door.

    api_keys      the file of keys; None: the keyless rule holds
    own_key       of `motley serve` itself, which must see that the doors answer; made anew at each start
    open_health   health is told without a key
    cors_origins  web pages from there may call
    log_folder    where the access log goes; None: stderr
    echo_id       answers over HTTP carry x-request-id; Serve's own server does that itself
    reader_timeout_s   a client that reads nothing of its answer for so long is left
    resume             when a replica is given up, and how another is looked for
    routing            objectives, and how requests wait for their turn
    unknown_fields     what becomes of a request's field that nobody knows, where the protocol leaves that open
    salt               of the prefixes of all tenants: ingresses with the same find what each of them has sent
    """

    api_keys: Path | None = None
    own_key: StoredKey | None = None
    open_health: bool = False
    cors_origins: tuple[str, ...] = ()
    log_folder: Path | None = None
    echo_id: bool = True
    reader_timeout_s: float = READER_TIMEOUT_S
    resume: ResumePolicy = ResumePolicy()  # noqa: RUF009  frozen
    routing: Routing = Routing()  # noqa: RUF009  frozen
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    salt: bytes = field(default_factory=partial(secrets.token_bytes, 16), repr=False)

    def guard(self) -> Guard:
        """Raises ConfigurationError when the file of keys cannot be used."""
        if self.api_keys is None:
            return Guard(open_health=self.open_health)
        own = () if self.own_key is None else (self.own_key,)
        return Guard(KeyFile(self.api_keys, own), open_health=self.open_health)
