"""The door: the only way from a client's words to a `Request`. Holds the tokenizer, never the weights."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ..replicas.errors import DeadlineExceeded, InvalidRequest, NotFound
from ..replicas.protocol import ModelInfo, Request
from ..replicas.sampling_params import SamplingParams
from ..replicas.seeds import fresh_seed
from ..replicas.tokenizer import Tokenizer
from .ask import Admitted, Ask

T = TypeVar("T")

MAX_PRIORITY = 2**31 - 1
MAX_TIMEOUT_S = 24 * 3600.0


class Door:
    """Validates against the model, tokenizes in an executor, fixes seed, request id and cache salt."""

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer, defaults: Mapping[str, Any], salt: bytes) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.started = int(time.time())
        self._defaults = defaults
        self._salt = salt

    def check_model(self, name: str) -> None:
        if name and name != self.info.name:
            raise NotFound(
                f"model: {name!r} is not served here; this is {self.info.name!r}", param="model", code="model_not_found"
            )

    async def admit(self, ask: Ask, *, tenant: str = "") -> Admitted:
        """Raises InvalidRequest naming the client's field, NotFound, DeadlineExceeded."""
        self.check_model(ask.model)
        _check_priority(ask.priority)
        _check_timeout(ask.timeout_s)
        sampling = self._sampling(ask)
        prompt_ids = await self.prompt_ids(ask.prompt, chat=ask.chat, template_arguments=ask.template_arguments)
        sampling = self._fit(sampling, prompt_ids, ask)
        request = Request(
            request_id=secrets.token_hex(16),
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            output_ids=self._output_ids(ask.output_ids, sampling.n),
            deadline_s=ask.timeout_s,
            priority=ask.priority,
            tenant=tenant,
            cache_salt=self._salt + tenant.encode(),
        )
        return Admitted(request, ask, self.info.name, int(time.time()))

    async def prompt_ids(
        self,
        prompt: str | Sequence[Any],
        *,
        chat: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        add_special_tokens: bool = True,
    ) -> Sequence[int]:
        """Token ids of text, of ids (checked) or of a chat's messages; at least one."""
        limit = self.info.max_model_len
        if chat:
            return await _in_executor(self.tokenizer.chat, prompt, arguments=template_arguments, max_tokens=limit)
        if not isinstance(prompt, str):
            return self.check_ids("prompt", prompt)
        ids = await _in_executor(self.tokenizer.encode, prompt, add_special_tokens, max_tokens=limit)
        if not prompt or not ids:
            raise InvalidRequest("prompt: it is empty; give at least one token", param="prompt", code="invalid_value")
        return ids

    async def text(self, field: str, ids: Sequence[Any], *, skip_special_tokens: bool) -> str:
        checked = self.check_ids(field, ids)
        return await _in_executor(self.tokenizer.decode, checked, skip_special_tokens=skip_special_tokens)

    def check_ids(self, field: str, ids: Sequence[Any]) -> tuple[int, ...]:
        if not ids:
            raise InvalidRequest(f"{field}: it is empty; give at least one token", param=field, code="invalid_value")
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < self.info.vocab_size:
                raise InvalidRequest(
                    f"{field}: {str(token_id)[:40]} is no token id; expected integers from 0 to "
                    f"{self.info.vocab_size - 1}",
                    param=field,
                    code="invalid_value",
                )
        return tuple(ids)

    def _sampling(self, ask: Ask) -> SamplingParams:
        given = {name: value for name, value in ask.sampling.items() if value is not None}
        try:
            sampling = SamplingParams(**{**self._defaults, **given})
            sampling.check_vocabulary(self.info.vocab_size)
        except InvalidRequest as error:
            raise _in_wire_names(error, ask.wire_names) from None
        return sampling if sampling.seed is not None else replace(sampling, seed=fresh_seed())

    def _fit(self, sampling: SamplingParams, prompt_ids: Sequence[int], ask: Ask) -> SamplingParams:
        """Fix max_tokens: as asked, else the protocol's default, else until the context is full."""
        room = self.info.max_model_len - len(prompt_ids)
        if room < 1:
            field = "messages" if ask.chat else "prompt"
            raise self._too_long(field, f"it has {len(prompt_ids)} tokens")
        wanted = sampling.max_tokens or ask.default_max_tokens or room
        if ask.default_max_tokens and sampling.max_tokens is None:
            wanted = max(wanted, sampling.min_tokens)
        if sampling.min_tokens > room:
            raise InvalidRequest(
                f"min_tokens: {sampling.min_tokens} is not accepted; after the prompt there is room for {room} tokens",
                param="min_tokens",
                code="invalid_value",
            )
        return replace(sampling, max_tokens=min(wanted, room))

    def _output_ids(self, output_ids: Sequence[Sequence[int]], n: int) -> tuple[tuple[int, ...], ...]:
        if not output_ids:
            return ()
        if len(output_ids) != n:
            raise InvalidRequest(
                f"output_ids: {len(output_ids)} lists for n={n} choices; expected none, or one per choice",
                param="output_ids",
                code="invalid_value",
            )
        return tuple(self.check_ids("output_ids", ids) if ids else () for ids in output_ids)

    def _too_long(self, field: str, has: str) -> InvalidRequest:
        return InvalidRequest(
            f"{field}: {has}; the context holds {self.info.max_model_len} tokens, prompt and at least one of output",
            param=field,
            code="context_length_exceeded",
        )


def check_text(field: str, text: str) -> None:
    """Raise InvalidRequest for lone surrogates: they have no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{field}: it holds a lone surrogate", param=field, code="invalid_value") from None


async def _in_executor(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, partial(function, *args, **kwargs))


def _in_wire_names(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    wire = names.get(error.param or "", error.param or "")
    if wire == error.param:
        return error
    return InvalidRequest(error.message.replace(error.param or "", wire, 1), param=wire, code=error.code)


def _check_priority(priority: Any) -> None:
    if type(priority) is not int or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequest(
            f"priority: {str(priority)[:40]!r} is not accepted; expected an integer of at most {MAX_PRIORITY}, "
            "or as far below 0",
            param="priority",
            code="invalid_value",
        )


def _check_timeout(timeout_s: Any) -> None:
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or math.isnan(timeout_s):
        raise InvalidRequest("timeout_s: expected a number of seconds", param="timeout_s", code="invalid_value")
    if timeout_s <= 0:
        raise DeadlineExceeded("timeout_s: the time is already over", param="timeout_s")
    if timeout_s > MAX_TIMEOUT_S:
        raise InvalidRequest(f"timeout_s: at most {MAX_TIMEOUT_S:.0f} seconds", param="timeout_s", code="invalid_value")
