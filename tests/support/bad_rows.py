"""The battery of bad requests: what is asked, and what must come of it over every protocol there is.

A row says for each protocol what comes, or why it has no such row; which of the two is not left to chance:
`test_battery` asks every protocol that has words for a row, and fails where the table says that it has none.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from every_protocol import ABSENT, JSON, NO_BYTES, NO_TYPE, Fields, Grpc, Http, Outcome, Question
from service_checkpoint import VOCABULARY

from motley.replicas.sampling_params import MAX_STOP_CHARS, MAX_STOP_STRINGS

CONTEXT = 65_536
MAX_MESSAGE_BYTES = 8 * 2**20

COMPLETIONS = ("completions", "completions stream")
CHAT = ("chat", "chat stream")
RESPONSES, EMBEDDINGS = ("responses",), ("embeddings",)
MOTLEY_COMPLETE = ("motley Complete", "motley CompleteStream")
MOTLEY_CHAT = ("motley Chat", "motley ChatStream")
MOTLEY = MOTLEY_COMPLETE + MOTLEY_CHAT
MOTLEY_EMBED, VLLM_EMBED, PYTHON_EMBED = ("motley Embeddings",), ("vllm Embed",), ("Engine.embed",)
KSERVE_REST = ("kserve REST",)
KSERVE = ("kserve ModelInfer", "kserve ModelStreamInfer", "kserve ModelStreamInfer, streaming")
VLLM = ("vllm Generate", "vllm Generate, stream")
PYTHON = ("Engine.generate", "Engine.stream")
CHATS = CHAT + MOTLEY_CHAT
PROTOBUF = MOTLEY + VLLM  # fields of fixed types
NO_SAMPLING = MOTLEY_EMBED + VLLM_EMBED + PYTHON_EMBED
OVER_HTTP = COMPLETIONS + CHAT + EMBEDDINGS + KSERVE_REST
OVER_GRPC = MOTLEY + MOTLEY_EMBED + KSERVE + VLLM + VLLM_EMBED
IN_PYTHON = PYTHON + PYTHON_EMBED
EVERYTHING = (*OVER_HTTP, *RESPONSES, *OVER_GRPC, *IN_PYTHON)

NO_ZERO = "0 is how this protocol says nothing"
NO_WIRE = "nothing is sent"
NOT_SAMPLED = "an embedding is not sampled"
NO_FIELDS = "a call has no such fields"
ONLY_TEXT = "a chat is of text"
NO_CHAT = "a prompt is no list of messages"


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another test that has it, `file::test`: it takes a service, or a time, of its own."""

    test: str


Said = Outcome | str | Elsewhere
# /v1/responses is not there, whatever is asked of it.
NOT_THERE = Outcome("not found", "", "unsupported_endpoint")


def on(protocols: Sequence[str], why: Any) -> dict[str, Any]:
    return dict.fromkeys(protocols, why)


def invalid(param: str, code: str | None = None) -> Outcome:
    return Outcome("invalid", param, code)


OK = Outcome("ok")


@dataclass(frozen=True)
class Row:
    """`but`: protocols for which something else comes (an Outcome), or that have no such row, or elsewhere."""

    what: str
    question: Question
    outcome: Outcome
    but: Mapping[str, Said] = field(default_factory=dict)

    def of(self, protocol: str) -> Said:
        return self.but.get(protocol, NOT_THERE if protocol in RESPONSES else self.outcome)


def sampling(fields: Fields, param: str, *less: Mapping[str, str]) -> Row:
    but = on(NO_SAMPLING, NOT_SAMPLED) | on(EMBEDDINGS, OK)  # which knows of no sampling: ignored
    for some in less:
        but |= some
    given = ", ".join(f"{name}={str(value)[:24]}" for name, value in fields.items())
    return Row(given, Question(sampling=fields), invalid(param), but)


NOT_JSON = on(PROTOBUF, NO_TYPE)
NOT_UNSIGNED = on(VLLM, NO_TYPE)
NOT_ZERO = on(VLLM, NO_ZERO)
AS_TEXT = on((*KSERVE, *KSERVE_REST), OK)  # clients of Triton's vLLM backend send numbers so
NOT_WIDE = on(KSERVE, NO_TYPE) | NOT_JSON  # nor integers beyond 64 bits
NAN, INF = math.nan, math.inf

SAMPLING = [
    sampling({"n": 0}, "n", NOT_ZERO),
    sampling({"n": -1}, "n", NOT_UNSIGNED),
    sampling({"n": 10**9}, "n"),
    sampling({"n": True}, "n", NOT_JSON),
    sampling({"n": 1.5}, "n", NOT_JSON),
    sampling({"n": "1"}, "n", NOT_JSON, AS_TEXT),
    sampling({"temperature": NAN}, "temperature"),
    sampling({"temperature": INF}, "temperature"),
    sampling({"temperature": -INF}, "temperature"),
    sampling({"temperature": "NaN"}, "temperature", NOT_JSON),
    sampling({"temperature": True}, "temperature", NOT_JSON),
    sampling({"temperature": -0.1}, "temperature"),
    sampling({"temperature": 1e6}, "temperature"),
    sampling({"top_p": 0.0}, "top_p", NOT_ZERO),
    sampling({"top_p": 1.01}, "top_p"),
    sampling({"top_p": NAN}, "top_p"),
    sampling({"top_p": "0.5"}, "top_p", NOT_JSON, AS_TEXT),
    sampling({"top_k": -2}, "top_k", NOT_UNSIGNED),
    sampling({"top_k": 0.01}, "top_k", NOT_JSON),
    sampling({"top_k": True}, "top_k", NOT_JSON),
    sampling({"top_k": 2**31}, "top_k", on(MOTLEY, NO_TYPE)),
    sampling({"min_p": 1.1}, "min_p"),
    sampling({"min_p": -0.1}, "min_p"),
    sampling({"min_p": NAN}, "min_p"),
    sampling({"presence_penalty": 2.1}, "presence_penalty"),
    sampling({"presence_penalty": -2.1}, "presence_penalty"),
    sampling({"frequency_penalty": 2.1}, "frequency_penalty"),
    sampling({"frequency_penalty": -2.1}, "frequency_penalty"),
    sampling({"frequency_penalty": False}, "frequency_penalty", NOT_JSON),
    sampling({"repetition_penalty": 0.0}, "repetition_penalty", NOT_ZERO),
    sampling({"repetition_penalty": INF}, "repetition_penalty"),
    sampling({"seed": 2**64}, "seed", NOT_WIDE),
    sampling({"seed": -(2**63) - 1}, "seed", NOT_WIDE),
    sampling({"seed": "7"}, "seed", NOT_JSON, AS_TEXT),
    sampling({"max_tokens": 0}, "max_tokens"),
    sampling({"max_tokens": -2}, "max_tokens", NOT_UNSIGNED),
    sampling({"max_tokens": 2**63}, "max_tokens", NOT_WIDE),
    sampling({"max_tokens": True}, "max_tokens", NOT_JSON),
    sampling({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    sampling({"min_tokens": 10**6}, "min_tokens"),
    sampling({"min_tokens": CONTEXT}, "min_tokens"),  # the whole context, and there is a prompt
    sampling({"min_tokens": -1}, "min_tokens", NOT_UNSIGNED),
    sampling({"logit_bias": {VOCABULARY: 1.0}}, "logit_bias"),
    sampling({"logit_bias": {-1: 1.0}}, "logit_bias"),
    sampling({"logit_bias": {"x": 1.0}}, "logit_bias", NOT_JSON),
    sampling({"logit_bias": {1: NAN}}, "logit_bias"),
    sampling({"logit_bias": {1: 100.1}}, "logit_bias"),
    sampling({"logit_bias": {1: True}}, "logit_bias", NOT_JSON),
    sampling({"logit_bias": dict.fromkeys(range(301), 1.0)}, "logit_bias"),
    sampling({"logit_bias": [1]}, "logit_bias", NOT_JSON),
    sampling({"stop": ""}, "stop", NOT_JSON),
    sampling({"stop": [""]}, "stop"),
    sampling({"stop": ["a"] * (MAX_STOP_STRINGS + 1)}, "stop"),
    sampling({"stop": ["x" * MAX_STOP_CHARS] * 5}, "stop"),
    sampling({"stop": ["x" * 2**20]}, "stop"),
    sampling({"stop": [None]}, "stop", NOT_WIDE),
    sampling({"stop": ["\ud800"]}, "stop", NOT_WIDE),
    sampling({"stop_token_ids": [VOCABULARY]}, "stop_token_ids"),
    sampling({"stop_token_ids": [-1]}, "stop_token_ids", NOT_UNSIGNED),
    sampling({"stop_token_ids": [None]}, "stop_token_ids", NOT_JSON),
    sampling({"stop_token_ids": [True]}, "stop_token_ids", NOT_JSON),
    sampling({"logprobs": 21}, "logprobs"),
    sampling({"logprobs": -1}, "logprobs"),
    sampling({"ignore_eos": 1}, "ignore_eos", NOT_JSON),
    sampling({"ignore_eos": "true"}, "ignore_eos", NOT_JSON),
]


def prompt(what: str, given: Any, *less: Mapping[str, Any], code: str | None = None) -> Row:
    but: dict[str, Any] = {}
    for some in less:
        but |= some
    return Row(what, Question(prompt=given), invalid("prompt", code), but)


NOT_IDS = on(CHATS, ONLY_TEXT)
UNKNOWN, UNSUPPORTED = "unknown_parameter", "unsupported_parameter"
LONG = "context_length_exceeded"
MAY_FILL = on(
    EMBEDDINGS + MOTLEY_EMBED + VLLM_EMBED + PYTHON_EMBED,
    Elsewhere("tests/cluster/test_bad_rows_edges.py::test_the_edge_of_the_context"),
)
TEXT_ALONE = on(VLLM_EMBED, "it takes ids alone")
NO_SUCH_ID = on((*MOTLEY_COMPLETE, *MOTLEY_EMBED, *KSERVE, *VLLM, *VLLM_EMBED), NO_TYPE)
NO_MODEL = on((*VLLM, *VLLM_EMBED), "it asks for no model by name") | on(KSERVE_REST, "the model is in the path")
NO_SURROGATES = on((*MOTLEY, *MOTLEY_EMBED, *KSERVE, *VLLM), "bytes are no surrogates")
NOT_A_FIELD = on(IN_PYTHON, NO_FIELDS)
CHAT_ALONE = on(tuple(name for name in EVERYTHING if name not in CHATS + RESPONSES), NO_CHAT)


def messages(what: str, given: Any, *less: Mapping[str, Any]) -> Row:
    but: dict[str, Any] = dict(CHAT_ALONE)
    for some in less:
        but |= some
    return Row(what, Question(messages=given), invalid("prompt"), but)


PROMPTS = [
    prompt("an empty text", "", on(CHATS, OK), TEXT_ALONE),
    prompt("an empty list", [], NOT_IDS),
    Row("no prompt", Question(prompt=ABSENT), invalid("prompt"), on(IN_PYTHON, NO_FIELDS)),
    prompt("longer than the context", "x" * (CONTEXT + 1), TEXT_ALONE, code=LONG),
    prompt("the whole context", "x" * CONTEXT, MAY_FILL, TEXT_ALONE, code=LONG),
    prompt("the whole context in ids", [65] * CONTEXT, NOT_IDS, MAY_FILL, code=LONG),
    prompt("more ids than the context", [65] * (CONTEXT + 1), NOT_IDS, code=LONG),
    prompt("1 MB without a space", "x" * 2**20, TEXT_ALONE, code=LONG),
    prompt("an id beyond the vocabulary", [VOCABULARY], NOT_IDS),
    prompt("a negative id", [-1], NOT_IDS, on(VLLM + VLLM_EMBED, NO_TYPE)),
    prompt("an id of 2^63", [2**63], NOT_IDS, NO_SUCH_ID),
    prompt("a truth for an id", [True], NOT_IDS, NO_SUCH_ID),
    prompt("a fraction for an id", [1.0], NOT_IDS, NO_SUCH_ID),
    prompt("nothing for an id", [None], NOT_IDS, NO_SUCH_ID),
    prompt("a lone surrogate", "\ud800", NO_SURROGATES, TEXT_ALONE),
    Row("text that is not UTF-8", Question(b"\xff\xfe"), invalid(""),  # protobuf does not read the message
        on(KSERVE, invalid("prompt")) | on(OVER_HTTP + RESPONSES, NO_BYTES) | on(IN_PYTHON, "text is text")
        | TEXT_ALONE),
    Row("NUL and the text of a special token", Question("\0<|im_end|>"), OK, TEXT_ALONE),
    messages("no messages", []),
    messages("an unknown role", [{"role": "oracle", "content": "x"}]),
    messages("null content", [{"role": "user", "content": None}], on(MOTLEY_CHAT, NO_TYPE)),
    messages("content that is no text", [{"role": "user", "content": 7}], on(MOTLEY_CHAT, NO_TYPE)),
    messages("a message without content", [{"role": "user"}], on(MOTLEY_CHAT, "an empty text is how it says nothing")),
    messages("a message that is none", [7], on(MOTLEY_CHAT, NO_TYPE)),
    Row("two prompts", Question(both=True), invalid("prompt"),
        on(COMPLETIONS, invalid("messages", UNSUPPORTED)) | on(CHAT + EMBEDDINGS, invalid("?prompt", UNSUPPORTED))
        | on((*MOTLEY_COMPLETE, *MOTLEY_EMBED, *VLLM), "a oneof holds one of them")
        | on(MOTLEY_CHAT, "there is one field") | on(VLLM_EMBED, "there is one field") | on(IN_PYTHON, NO_FIELDS)),
]  # fmt: skip


def unknown(name: str, value: Any, *less: Mapping[str, Any]) -> Row:
    but: dict[str, Any] = dict(NOT_A_FIELD)
    for some in less:
        but |= some
    return Row(f"{name}, which there is not", Question(fields={name: value}), invalid(name), but)


ENDLESS = {"max_tokens": 60_000, "ignore_eos": True}
NOT_TEXT = on((*MOTLEY, *MOTLEY_EMBED), NO_TYPE)
FIELDS = [
    unknown("temprature", 0.5, on((*COMPLETIONS, *CHAT, *EMBEDDINGS, *KSERVE, *KSERVE_REST), OK)),  # ignored
    unknown("cache_salt", "mine"),
    unknown("prefix_hash", "00"),
    unknown("chat_template", "{{ 1 }}"),
    Row("an unknown model", Question(fields={"model": "gpt-4"}), Outcome("not found", "model"), NO_MODEL | NOT_A_FIELD),
    Row("a model of 100,000 letters", Question(fields={"model": "m" * 100_000}), Outcome("not found", "model"),
        NO_MODEL | NOT_A_FIELD),
    Row("priority=2^63", Question(fields={"priority": 2**63}), invalid("priority"),
        NOT_TEXT | on(KSERVE, NO_TYPE) | NOT_A_FIELD),
    Row("priority=high", Question(fields={"priority": "high"}), invalid("priority"), NOT_TEXT | NOT_A_FIELD),
    Row("priority=true", Question(fields={"priority": True}), invalid("priority"), NOT_TEXT | NOT_A_FIELD),
    Row("timeout_s=soon", Question(fields={"timeout_s": "soon"}), invalid("timeout_s"), NOT_TEXT | NOT_A_FIELD),
    Row("timeout_s=NaN", Question(fields={"timeout_s": NAN}), invalid("timeout_s"),
        on(KSERVE_REST + KSERVE, "whole microseconds") | NOT_A_FIELD),
    Row("timeout_s of 400 digits", Question(fields={"timeout_s": 10**400}), invalid("timeout_s"),
        NOT_TEXT | on(KSERVE, NO_TYPE) | NOT_A_FIELD),
    Row("a deadline of 1 ms", Question(sampling=ENDLESS, fields={"timeout_s": 0.001}),
        Outcome("deadline"), on(VLLM, invalid("timeout_s"))
        | on(NO_SAMPLING, NOT_SAMPLED) | NOT_A_FIELD),
]  # fmt: skip


def schema(given: Any) -> Row:
    """Return a row whose text is no schema, or a schema that cannot be enforced."""
    text = json.dumps(given)
    but = on(NO_SAMPLING, NOT_SAMPLED) | on(EMBEDDINGS, OK)
    question = Question(sampling={"json_schema": text})
    return Row(f"the schema {text[:60]}", question, invalid("json_schema", "invalid_grammar"), but)


NO_SCHEMA: list[Any] = [{}, [], 7, True, None, "x"]
SCHEMAS = [
    schema([]),
    schema({"not": {}}),
    schema({"$ref": "#"}),
    schema({"$ref": "#/$defs/none"}),
    *(schema({"type": "string", "format": value}) for value in NO_SCHEMA),
    *(schema({keyword: value}) for keyword in ("allOf", "anyOf", "oneOf", "$ref", "enum") for value in NO_SCHEMA),
    *(schema({"type": "array", "prefixItems": value}) for value in NO_SCHEMA if value != []),
    *(schema({"type": "object", "properties": value, "required": ["a"]}) for value in NO_SCHEMA),
    *(schema({"type": "string", "pattern": f"\\u{{{code:x}}}"}) for code in (0xD800, 0x110000, 2**31, 2**400)),
]

ROWS = [*SAMPLING, *PROMPTS, *FIELDS, *SCHEMAS]


@dataclass(frozen=True)
class Wire:
    """A request below the words: bytes, sizes, forms. `http` and `grpc` send it; a text says why they do not."""

    what: str
    http: Callable[[Http], Outcome] | str
    grpc: Callable[[Grpc], Outcome] | str
    http_outcome: Outcome = field(default_factory=lambda: invalid("", "invalid_json"))
    grpc_outcome: Outcome = field(default_factory=lambda: invalid(""))
    but: Mapping[str, Outcome] = field(default_factory=dict)


def body(data: bytes) -> Callable[[Http], Outcome]:
    return lambda protocol: protocol.post(data)


def message(data: bytes) -> Callable[[Grpc], Outcome]:
    return lambda protocol: protocol.call(data)


def with_headers(**headers: str) -> Callable[[Http], Outcome]:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda protocol: protocol.post(gzip.compress(b" " * 2**24), {**JSON, **given})


def larger(protocol: Http, *, chunked: bool) -> Outcome:
    """A body of 100 MB, sent until there is an answer. It is not JSON: were it read, the answer would be another."""
    head = f"POST {protocol.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {100 * 2**20}"
    part = b" " * 2**20
    parts = itertools.repeat(b"100000\r\n" + part + b"\r\n" if chunked else part, 100)
    with socket.create_connection(("127.0.0.1", protocol.port), timeout=60) as connection:
        connection.sendall(f"{head}{length}\r\n\r\n".encode())
        return protocol.outcome(*_response_while(connection, parts))


def _response_while(connection: socket.socket, parts: Iterable[bytes]) -> tuple[int, str]:
    """Status and body of the answer that comes while these are sent."""
    received = b""
    connection.setblocking(False)
    pending = memoryview(b"")
    sending: Iterator[bytes] | None = iter(parts)
    deadline = time.monotonic() + 60
    while b"\r\n\r\n" not in received or not received.endswith(b"}"):
        assert time.monotonic() < deadline, received
        readable, writable, _ = select.select([connection], [] if sending is None else [connection], [], 1)
        if readable:
            part = connection.recv(65536)
            if not part:
                break
            received += part
        elif writable and sending is not None:
            if not pending:
                pending = memoryview(next(sending, b""))
                assert pending, "all of it was taken"
            try:
                pending = pending[connection.send(pending) :]
            except BlockingIOError:
                continue
            except (BrokenPipeError, ConnectionResetError):  # answered and closed since `select`: read the answer
                sending = None
    head, _, rest = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), rest[rest.index(b"{") : rest.rindex(b"}") + 1].decode()


def inflating(protocol: Grpc) -> Outcome:
    """A few kilobytes on the wire, and more than the cap when they are inflated."""
    return protocol.call(bytes(4 * MAX_MESSAGE_BYTES), compression=grpc.Compression.Gzip)


def many_fields(protocol: Grpc) -> Outcome:
    """Millions of empty messages or of numbers one by one: some kilobytes on the wire, seconds for a parser."""
    half = MAX_MESSAGE_BYTES // 2 - 8
    if protocol.name in VLLM + VLLM_EMBED:  # whose one message of ids has a length of four bytes
        length = bytes([2 * half & 127 | 128, half >> 6 & 127 | 128, half >> 13 & 127 | 128, half >> 20])
        return protocol.call(b"\x12" + length + b"\x10\x00" * half, compression=grpc.Compression.Gzip)
    empty = b"\x2a\x00" if protocol.name in (*MOTLEY_COMPLETE, *KSERVE) else b"\x12\x00"
    return protocol.call(empty * half, compression=grpc.Compression.Gzip)


def other_method(protocol: Grpc) -> Outcome:
    path, protocol.path = protocol.path, f"/{protocol.service}/NoSuch{protocol.method}"
    try:
        return protocol.call(b"")
    finally:
        protocol.path = path


WRONG_MEDIA = Outcome("media", "Content-Type", "unsupported_media")
ENCODED = Outcome("media", "Content-Encoding", "unsupported_media")
EXHAUSTED = Outcome("exhausted", "", "body_too_large")
MANY = Outcome("exhausted", "", "too_many_values")
TOO_LARGE = Outcome("exhausted")
GROUPS = b"\x0b" * 100_000  # each begins a group within the one before
NO_MEDIA = "a call without grpc's own content type is none"

IN_A_TEXT = on(KSERVE_REST, Outcome("media"))  # its errors are texts, and no field of the body is at fault
UNREAD = on(RESPONSES, NOT_THERE)  # which reads no body

WIRES = [
    Wire("no body", body(b""), message(b""), grpc_outcome=invalid("prompt"), but=UNREAD),
    Wire("half a body", body(b"{"), message(b"\xff\xff\xff"), but=UNREAD),
    Wire("another kind of body", body(b"[]"), message(b"\x0a\x05a"), but=UNREAD),
    Wire("quotes that are none", body(b"{'prompt': 'a'}"), "protobuf has no quotes", but=UNREAD),
    Wire("5e4 deep", body(b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"), message(GROUPS[::2]), but=UNREAD),
    Wire("1e5 deep", body(b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), message(GROUPS), MANY,
         but=UNREAD),
    Wire("an integer of 5,000 digits", body(b'{"seed": ' + b"9" * 5000 + b"}"), message(b"\x08" + b"\xff" * 5000),
         but=UNREAD),
    Wire("text that is not UTF-8", body(b'{"model": "\xff\xfe"}'), message(b"\x0a\x02\xff\xfe"), but=UNREAD),
    Wire("a field twice", body(b'{"model": "a", "model": "b"}'), "the last counts, as protobuf has it",
         invalid("model", "invalid_json"), but=UNREAD | on(KSERVE_REST, invalid("?model"))),
    Wire("another content type", with_headers(Content_Type="text/plain"), NO_MEDIA, WRONG_MEDIA,
         but=UNREAD | IN_A_TEXT),
    Wire("a gzip bomb", with_headers(Content_Encoding="gzip"), inflating, ENCODED, TOO_LARGE, UNREAD | IN_A_TEXT),
    Wire("another method", lambda protocol: protocol.post(b"", method="GET"), other_method,
         Outcome("method", "", "method_not_allowed"), Outcome("method"),
         UNREAD | on(CHAT, NOT_THERE)  # which would be stored chats
         | on(KSERVE_REST, Outcome("not found", "?name"))),  # which would be a model of that name
    Wire("100 MB", lambda protocol: larger(protocol, chunked=False), lambda protocol: protocol.call(bytes(100 * 2**20)),
         EXHAUSTED, TOO_LARGE),
    Wire("millions of fields", body(b"{" + b'"a":0,' * 10**6 + b'"a":0}'), many_fields, MANY, invalid("prompt"),
         UNREAD | on(MOTLEY_COMPLETE, invalid("output_ids"))),
    Wire("100 MB in chunks", lambda protocol: larger(protocol, chunked=True), "a message has one length", EXHAUSTED,
         but=UNREAD),
]  # fmt: skip

WITHOUT_END = [
    Elsewhere(test)
    for test in (
        "tests/cluster/test_bad_rows_edges.py::test_a_model_without_a_template",
        "tests/replicas/test_tokenizer.py::test_a_megabyte_without_a_space_is_refused_before_it_is_tokenized",
        "tests/system/test_pressure.py::test_connections_cut_in_the_middle",
        "tests/cluster/test_keys_walk.py::test_every_route",  # no key, or a wrong one
        "tests/cluster/test_keys_walk.py::test_every_rpc",
        "tests/cluster/test_admission_deadlines.py::test_a_deadline_of_a_millisecond_is_never_run",
        "tests/system/test_keys_service.py::test_a_slow_head_is_closed",
        "tests/system/test_pressure.py::test_readers_that_take_nothing",
        "tests/system/test_pressure.py::test_senders_that_do_not_stop",
        "tests/cluster/test_senders.py::test_how_large_a_head_may_be_over_http",
        "tests/system/test_pressure.py::test_leaving_and_deadlines_while_waiting",
        "tests/system/test_cancel.py::test_leaving_while_it_runs",
        "tests/system/test_pressure.py::test_rapid_resets",
    )
]
