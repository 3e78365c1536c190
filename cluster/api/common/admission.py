"""Admission: the only way from a client's request to a `Request`. It has the tokenizer, never the weights."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ....replicas.engine.model_limits import resolve_max_tokens
from ....replicas.errors import DeadlineExceeded, InvalidRequest, NotFound, Overloaded
from ....replicas.execution.random_seeds import DRAWN_SEED, fresh_seed
from ....replicas.sampling_params import SamplingParams
from ....replicas.short_repr import short_repr
from ....replicas.text.chat.tool_definitions import Tool
from ....replicas.text.tokenizer.tokenizer import Tokenizer
from ....replicas.types import ModelInfo, Request
from ...transport import access_log
from ...transport.caller import MAX_CLIENT_ID, Caller
from .collected_response import MAX_RESPONSE_LOGPROBS
from .logit_bias import bias_by_token
from .parsed_request import AdmittedRequest, BodyLimits, ParsedRequest

T = TypeVar("T")

# A text up to this is tokenized where it is: sooner done than handed to another thread and back. Not where that may
# wait for another process, or for what the first text of a special token needs.
SHORT_CHARS = 512
SHORT_GRAMMAR = 4096  # bytes of schemas, patterns and tools, likewise of their check
MAX_PRIORITY = 2**31 - 1
MAX_TIMEOUT_S = 24 * 3600.0
MIN_VALUES = 65_536  # a body may hold so many values, whatever the model
MAX_THREADS = 32  # of each, one text is read at a time
MAX_TRUNCATED_CONTEXTS = 16  # contexts: of a prompt that is to be cut to length, more than that is refused as any is
MAX_TOKENIZING = 512  # prompts that are being tokenized, or wait for it
MIN_LEFT_S = 0.002  # the way to a replica and back: with less left, no answer could be in time


class RequestAdmitter:
    """Admission of requests: validates against the model, tokenizes in an executor, fixes seed, request id and cache
    salt.

    groups   cache group by tenant, for tenants that share prefixes
    context  returns the longest context of the fleet's pools now, in tokens; None, or a result of 0: as `info` says
    """

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Tokenizer,
        defaults: Mapping[str, Any],
        salt: bytes,
        groups: Mapping[str, str] | None = None,
        context: Callable[[], int] | None = None,
    ) -> None:
        self._info = info
        self._context = context
        self.tokenizer = tokenizer
        self.started = int(time.time())
        self._defaults = defaults
        self.groups = groups or {}
        self._salt = salt
        self._threads = ThreadPoolExecutor(MAX_THREADS, "motley-text")
        self._at_work = 0  # calls in the executor or before it

    @property
    def info(self) -> ModelInfo:
        """The model's description, with the context length of the pools that there are now."""
        context = self._context() if self._context is not None else 0
        if context and context != self._info.max_model_len:
            self._info = replace(self._info, max_model_len=context)
        return self._info

    def body_limits(self, prompts: int = 4) -> BodyLimits:
        """Return how many values a body may hold: enough for `prompts` prompts of token ids that fill the context."""
        context = self.info.max_model_len
        return BodyLimits(values=max(MIN_VALUES, prompts * context), members=max(MIN_VALUES, context))

    def check_model(self, name: str) -> None:
        if name and name != self.info.name:
            raise NotFound(
                f"model: {short_repr(name)} is not served here; this is {self.info.name!r}",
                param="model",
                code="model_not_found",
            )

    async def admit(self, parsed: ParsedRequest, caller: Caller) -> AdmittedRequest:
        """Validate a request. Raises InvalidRequest naming the client's field, NotFound, DeadlineExceeded."""
        access_log.current_record().named(parsed.client_id, parsed.labels)
        try:
            return await self._admit(parsed, caller)
        except InvalidRequest as error:
            raise _in_wire_names(error, parsed.wire_names) from None

    async def _admit(self, parsed: ParsedRequest, caller: Caller) -> AdmittedRequest:
        self.check_model(parsed.model)
        _check_priority(parsed.priority)
        _check_timeout(parsed.timeout_s)
        timeout_s, began = _sooner(parsed.timeout_s, caller.timeout_s), caller.arrived_s
        try:
            async with asyncio.timeout(_left(timeout_s, began)):
                sampling = await self._sampling(parsed)
                prompt_ids, is_cut = await self._read_prompt(
                    parsed.prompt,
                    chat=parsed.chat,
                    template_arguments=parsed.template_arguments,
                    tools=parsed.tools.tools,
                    parse_special=parsed.parse_special,
                    add_special_tokens=parsed.add_special_tokens,
                    add_generation_prompt=parsed.add_generation_prompt,
                    continue_final_message=parsed.continue_final_message,
                    cut=self._cut(parsed, sampling),
                    cut_end=parsed.truncate_end,
                    name=parsed.prompt_name,
                )
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the request began") from None
        except InvalidRequest as error:
            if parsed.truncate is None or error.code != "context_length_exceeded":
                raise
            field = "messages" if parsed.chat else parsed.prompt_name
            raise self._too_long(
                field, f"it is more than {MAX_TRUNCATED_CONTEXTS} times what it would be cut to at most"
            ) from None
        sampling = self._fit(sampling, prompt_ids, parsed)
        request = Request(
            request_id=secrets.token_hex(16),
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            output_ids=self._output_ids(parsed.output_ids, sampling.n),
            deadline_s=_left(timeout_s, began),
            priority=parsed.priority,
            tenant=caller.tenant,
            cache_salt=self._salt_of(caller.tenant),
            pooling=parsed.pooling,
            client_id=access_log.clean_id(parsed.client_id, MAX_CLIENT_ID),
        )
        return AdmittedRequest(request, parsed, self.info.name, int(time.time()), prompt_is_cut=is_cut)

    async def prompt_ids(self, prompt: str | Sequence[Any], **how: Any) -> Sequence[int]:
        """Return the token ids of a prompt that is not cut. `how`: the named arguments of `_read_prompt`."""
        ids, _ = await self._read_prompt(prompt, **how)
        return ids

    async def _read_prompt(
        self,
        prompt: str | Sequence[Any],
        *,
        chat: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
        add_special_tokens: bool = True,
        parse_special: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        cut: int | None = None,
        cut_end: bool = False,
        name: str = "prompt",
    ) -> tuple[Sequence[int], bool]:
        """Return the token ids of text, of ids (checked) or of a chat's messages; at least one. Errors call it `name`.

        `cut`: keep only so many of the last ids, or with `cut_end` of the first; None: a prompt that is too long is
        refused. Also returns whether ids were cut off.
        """
        limit = self.info.max_model_len * (1 if cut is None else MAX_TRUNCATED_CONTEXTS)
        span = slice(cut) if cut_end or cut is None else slice(-cut, None)
        if chat:
            if isinstance(prompt, Sequence) and len(prompt) > limit:  # each of them is a token at least
                raise self._too_long("messages", f"there are {len(prompt)} of them")
            chosen = {
                "arguments": template_arguments,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
            }
            ids = await self._tokens(self.tokenizer.begin_chat, prompt, max_tokens=limit, **chosen)
            return ids[span], len(ids[span]) < len(ids)
        if not isinstance(prompt, str):
            given = prompt[span] if isinstance(prompt, list | tuple) else prompt
            return self.check_ids(name, given), len(given) < len(prompt)
        how: dict[str, Any] = {"parse_special": parse_special, "max_tokens": limit, "param": name}
        if len(prompt) <= SHORT_CHARS and parse_special and not self.tokenizer.uses_own_process:
            ids = self.tokenizer.encode(prompt, add_special_tokens, **how)
        else:
            ids = await self._tokens(self.tokenizer.begin_encode, prompt, add_special_tokens, **how)
        if not prompt or not ids:
            raise InvalidRequest(f"{name}: it is empty; give at least one token", param=name, code="invalid_value")
        return ids[span], len(ids[span]) < len(ids)

    def _cut(self, parsed: ParsedRequest, sampling: SamplingParams) -> int | None:
        """Return to how many tokens the prompt is cut; None if it is not. Raises InvalidRequest."""
        cut, context = parsed.truncate, self.info.max_model_len
        if cut is None:
            return None
        if type(cut) is not int or cut == 0 or not -1 <= cut <= context:
            raise InvalidRequest(
                f"truncate_prompt_tokens: {short_repr(cut)} is not accepted; "
                f"expected -1 or an integer from 1 to {context}",
                param="truncate_prompt_tokens",
                code="invalid_value",
            )
        if cut > 0:
            return cut
        output = 0 if parsed.pooling is not None else sampling.max_tokens or parsed.default_max_tokens or 1
        return max(context - output, 1)

    async def text(self, field: str, ids: Sequence[Any], *, skip_special_tokens: bool) -> str:
        checked = self.check_ids(field, ids)
        return await self._in_executor(self.tokenizer.decode, checked, skip_special_tokens=skip_special_tokens)

    async def read(self, translate: Callable[..., T], *args: Any, grammar_bytes: int) -> T:
        """Return the result of `translate` for these arguments, in a thread if that may take long.

        `grammar_bytes`: size of the schemas or patterns in the arguments: checking takes microseconds for each byte, in
        which the event loop would be blocked.
        """
        if grammar_bytes <= SHORT_GRAMMAR:
            return translate(*args)
        return await self._in_executor(translate, *args)

    async def _tokens(
        self, begin: Callable[..., list[int] | Future[list[int]]], *args: Any, **kwargs: Any
    ) -> list[int]:
        """Return token ids. If another process computes them, wait without a thread, in turn with other tenants."""
        ids = await self._in_executor(begin, *args, tenant=access_log.current_record().tenant, **kwargs)
        return await asyncio.wrap_future(ids) if isinstance(ids, Future) else ids

    async def _in_executor(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a function off the event loop. Raises Overloaded rather than queue without bound."""
        if self._at_work >= MAX_TOKENIZING:
            raise Overloaded(f"{self._at_work} prompts are being tokenized; try again shortly", code="queue_full")
        self._at_work += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **kwargs))
        finally:
            self._at_work -= 1

    def check_ids(self, field: str, ids: Any) -> tuple[int, ...]:
        if not isinstance(ids, list | tuple):
            raise InvalidRequest(
                f"{field}: {short_repr(ids)} is not accepted; expected text or token ids",
                param=field,
                code="invalid_value",
            )
        if not ids:
            raise InvalidRequest(f"{field}: it is empty; give at least one token", param=field, code="invalid_value")
        if len(ids) > self.info.max_model_len:  # before each of them is looked at: there may be millions
            raise self._too_long(field, f"it has {len(ids)} tokens")
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < self.info.vocab_size:
                raise InvalidRequest(
                    f"{field}: {short_repr(token_id)} is no token id; expected integers from 0 to "
                    f"{self.info.vocab_size - 1}",
                    param=field,
                    code="invalid_value",
                )
        return tuple(ids)

    def _salt_of(self, tenant: str) -> bytes:
        """Return the tenant's cache salt: the same salt finds the same prefixes. A group may have a tenant's name."""
        group = self.groups.get(tenant)
        return self._salt + (b"tenant " + tenant.encode() if group is None else b"group " + group.encode())

    async def _sampling(self, parsed: ParsedRequest) -> SamplingParams:
        given = {name: value for name, value in parsed.sampling.items() if value is not None}
        if isinstance(given.get("logit_bias"), list):
            given["logit_bias"] = await bias_by_token(given["logit_bias"], self._word_token_ids)
        sampling = SamplingParams(**{**self._defaults, **given})
        sampling.check_vocabulary(self.info.vocab_size)
        return replace(sampling, seed=fresh_seed()) if sampling.seed in (None, DRAWN_SEED) else sampling

    async def _word_token_ids(self, text: str) -> Sequence[int]:
        """Return the token ids of a text by itself, in which no text counts as a special token."""
        limit = self.info.max_model_len
        how: dict[str, Any] = {"parse_special": False, "max_tokens": limit, "param": "logit_bias"}
        return await self._tokens(self.tokenizer.begin_encode, text, False, **how)

    def _fit(self, sampling: SamplingParams, prompt_ids: Sequence[int], parsed: ParsedRequest) -> SamplingParams:
        """Set max_tokens: as asked, else the protocol's default, else until the context is full."""
        free_tokens = self.info.max_model_len - len(prompt_ids)
        field = "messages" if parsed.chat else parsed.prompt_name
        if free_tokens < (parsed.pooling is None):
            raise self._too_long(field, f"it has {len(prompt_ids)} tokens")
        if parsed.pooling is not None:
            return sampling
        if sampling.prompt_logprobs is not None:
            _check_values(len(prompt_ids) * (1 + sampling.prompt_logprobs), parsed.times_shown(sampling.n))
        return replace(sampling, max_tokens=resolve_max_tokens(sampling, free_tokens, parsed.default_max_tokens))

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
            f"{field}: {has}. This model's maximum context length is {self.info.max_model_len} tokens, of prompt and "
            "at least one of output",
            param=field,
            code="context_length_exceeded",
        )


def _sooner(*timeouts: float | None) -> float | None:
    return min((timeout for timeout in timeouts if timeout is not None), default=None)


def _left(timeout_s: float | None, began: float) -> float | None:
    """Return the seconds of the timeout that are left, None without one. Raises DeadlineExceeded if too few are."""
    if timeout_s is None:
        return None
    left = timeout_s - (time.monotonic() - began)
    if left < MIN_LEFT_S:
        raise DeadlineExceeded("the deadline passed before the request began")
    return left


def check_text(field: str, text: str) -> None:
    """Raise InvalidRequest for lone surrogates: they have no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{field}: it holds a lone surrogate", param=field, code="invalid_value") from None


def _in_wire_names(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    wire = names.get(error.param or "", error.param or "")
    if wire == error.param:
        return error
    return InvalidRequest(error.message.replace(error.param or "", wire, 1), param=wire, code=error.code)


def _check_values(values: int, shown: int) -> None:
    if values * shown > MAX_RESPONSE_LOGPROBS:
        times = f", in each of {shown} choices" if shown > 1 else ""
        raise InvalidRequest(
            f"prompt_logprobs: this prompt has {values}, alternatives included{times}; at most {MAX_RESPONSE_LOGPROBS}",
            param="prompt_logprobs",
            code="answer_too_large",
        )


def _check_priority(priority: Any) -> None:
    if type(priority) is not int or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequest(
            f"priority: {short_repr(priority)} is not accepted; "
            f"expected an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}",
            param="priority",
            code="invalid_value",
        )


def _check_timeout(timeout_s: Any) -> None:
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s != timeout_s:  # NaN
        raise InvalidRequest("timeout_s: expected a number of seconds", param="timeout_s", code="invalid_value")
    if timeout_s <= 0:
        raise DeadlineExceeded(
            "timeout_s: the deadline has passed already; expected a number above 0", param="timeout_s"
        )
    if timeout_s > MAX_TIMEOUT_S:
        raise InvalidRequest(f"timeout_s: at most {MAX_TIMEOUT_S:.0f} seconds", param="timeout_s", code="invalid_value")
