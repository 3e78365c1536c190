"""Limits of a hostile tokenizer.json: it takes neither time nor memory without end, and ends only in a named error."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from motley.replicas.errors import CheckpointError, InvalidRequest, Overloaded
from motley.replicas.text.tokenizer import tokenizer, tokenizer_process
from motley.replicas.text.tokenizer.tokenizer import Tokenizer
from motley.replicas.text.tokenizer.tokenizer_cost import find_unbounded_component
from motley.replicas.text.tokenizer.tokenizer_process import TokenizerProcess

VOCABULARY = {char: i for i, char in enumerate("abcdefgh !px")}
BPE = {"type": "BPE", "vocab": VOCABULARY, "merges": []}
UNKNOWN = {"id": "Q", "type_id": 0}


def file(**changes: Any) -> dict[str, Any]:
    return {"version": "1.0", "added_tokens": [], "model": BPE, **changes}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(old: dict[str, str], new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": old, "content": new}


def growing(times: int, char: str = "a") -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [replace({"String": char}, char * 10)] * times}


def template(single: list[dict[str, Any]], special: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special or {}}


def load(folder: Path, state: dict[str, Any], **config: Any) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(state))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


BROKEN = {
    "no-tokens": (file(model={**BPE, "vocab": {}}), "model", "empty vocabulary"),
    "no-pieces": (file(model={"type": "Unigram", "vocab": [], "unk_id": None}), "model", "empty vocabulary"),
    "no-model": (file(model=None), "model", "expected an object with a model"),
    "no-unknown": (file(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "x"}), "model", "UNK"),
    "unknown-outside": (file(model={"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 9}), "model", "UnkId"),
    "id-below-zero": (file(model={**BPE, "vocab": {"a": -1}}), "model", "-1"),
    "kind-of-model": (file(model={"type": "Other", "vocab": {"a": 0}}), "model", "not a tokenizer"),
    "table": (file(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "normalizer", "Precompiled"),
    "table-in-use": (
        file(normalizer={"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}), "normalizer", "bounds"),
    "replaces-nothing": (
        file(normalizer=replace({"String": ""}, "zz"), pre_tokenizer={
            "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}),
        "normalizer", "short text"),
    "kind-of-normalizer": (file(normalizer={"type": "Other"}), "normalizer", "not a tokenizer"),
    "expression": (file(pre_tokenizer=split("(a")), "pre_tokenizer", "parenthesis"),
    "length": (file(pre_tokenizer={"type": "FixedLength", "length": 0}), "pre_tokenizer", "chunk size"),
    "template": (file(post_processor=template([{"SpecialToken": UNKNOWN}])), "post_processor", "short text"),
    "template-of-two": (
        file(post_processor=template([{"Sequence": {"id": "B", "type_id": 0}}])), "post_processor", "short text"),
    "decoder": (file(decoder=replace({"String": "a"}, "a" * 100)), "decoder", "100"),
}  # fmt: skip


@pytest.mark.parametrize(("state", "component", "says"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_one_error_that_names_the_component(
    state: dict[str, Any], component: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        load(tmp_path, state)
    assert (caught.value.file, caught.value.tensor) == ("tokenizer.json", component)


DOUBTS = {
    "expression": (file(pre_tokenizer=split("(a+)+$")), "pre_tokenizer"),
    "expression-in-a-sequence": (
        file(pre_tokenizer={"type": "Sequence", "pretokenizers": [split("a"), split("a*a*[bc]")]}), "pre_tokenizer"),
    "expression-of-a-normalizer": (file(normalizer=replace({"Regex": "(a|a)*$"}, "b")), "normalizer"),
    "growth": (file(normalizer=growing(2)), "normalizer"),
    "growth-of-what-is-empty": (file(normalizer=replace({"Regex": "x*"}, "a" * 100)), "normalizer"),
    "before": (file(normalizer={"type": "Prepend", "prepend": "a" * 2000}), "normalizer"),
    "table": (file(normalizer={"type": "Precompiled", "precompiled_charsmap": "////////"}), "normalizer"),
    "kind": (file(normalizer={"type": "Newer"}), "normalizer"),
    "kind-of-splitter": (file(pre_tokenizer={"type": "Newer"}), "pre_tokenizer"),
    "words": (file(model={"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 10**9}), "model"),
    "pieces": (
        file(model={"type": "Unigram", "vocab": [["a", 0.0], ["a" * 5000, -1.0]], "unk_id": 0}), "model"),
    "short-pieces": (file(model={"type": "Unigram", "vocab": [["a", 0.0], ["a" * 100, -1.0]], "unk_id": 0}), None),
    "twice": (file(post_processor=template([{"Sequence": {"id": "A", "type_id": 0}}] * 2)), "post_processor"),
    "behind": (file(post_processor=template([], {"a": {"id": "a", "ids": [1] * 3000, "tokens": []}})), None),
    "behind-and-used": (
        file(post_processor=template([{"SpecialToken": {"id": "a", "type_id": 0}}],
                                     {"a": {"id": "a", "ids": [1] * 3000, "tokens": []}})), "post_processor"),
    "white-space": (file(pre_tokenizer=split(r"\s+$")), None),
    "white-space-that-is-made": (
        file(normalizer=replace({"String": "a"}, " "), pre_tokenizer=split(r"\s+$")), "pre_tokenizer"),
    "nothing": (file(), None),
    "unicode": (file(normalizer={"type": "Sequence", "normalizers": [
        {"type": "NFKD"}, {"type": "NFKC"}, {"type": "Lowercase"}, {"type": "StripAccents"}]}), None),
    "xlnet": (file(normalizer={"type": "Sequence", "normalizers": [
        replace({"String": "``"}, '"'), replace({"String": "''"}, '"'), {"type": "NFKD"}, {"type": "StripAccents"},
        replace({"Regex": " {2,}"}, " ")]}), None),
    "llama-2": (file(normalizer={"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁")]}), None),
}  # fmt: skip


@pytest.mark.parametrize(("state", "component"), DOUBTS.values(), ids=DOUBTS)
def test_what_nothing_bounds_is_doubtful(state: dict[str, Any], component: str | None) -> None:
    doubt = find_unbounded_component(state)
    assert (None if doubt is None else doubt[0]) == component


# --- texts that are read in a process of their own ---


@pytest.fixture(scope="module")
def backtracking(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("backtracking")
    return load(folder, file(pre_tokenizer=split("(a+)+$|.")), chat_template="{{ messages[0]['content'] }}")


def test_ordinary_texts_are_as_ever(backtracking: Tokenizer) -> None:
    assert backtracking.encode("abc a") == [0, 1, 2, 8, 0]
    assert backtracking.chat([{"role": "user", "content": "abc"}]) == [0, 1, 2]
    assert backtracking.decode([0, 1, 2]) == "a b c"


@pytest.mark.parametrize("way", ["text", "chat"])
def test_a_hostile_text_is_refused_alone(way: str, backtracking: Tokenizer) -> None:
    hostile = "a" * 40 + "!"
    read = partial(backtracking.encode, hostile, param="input")
    if way == "chat":
        read = partial(backtracking.chat, [{"role": "user", "content": hostile}])
    with ThreadPoolExecutor(2) as threads:
        neighbour = threads.submit(backtracking.encode, "abc")
        with pytest.raises(InvalidRequest, match="the model's tokenizer") as caught:
            read()
        assert neighbour.result() == [0, 1, 2]
    assert caught.value.param == ("input" if way == "text" else "messages")
    assert caught.value.code in ("tokenizer_refused", "tokenizer_limit")
    assert backtracking.encode("abc") == [0, 1, 2]


def test_limits_and_refusals_are_those_of_every_text(backtracking: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        backtracking.encode("b" * 1000, max_tokens=10, param="input")
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    with pytest.raises(InvalidRequest) as caught:
        backtracking.chat([{"role": "nobody", "content": "a"}])
    assert caught.value.param == "messages[0].role"
    with pytest.raises(InvalidRequest, match="surrogate"):
        backtracking.encode("a\ud800")


def test_a_process_that_has_ended_is_started_again(backtracking: Tokenizer) -> None:
    assert backtracking._aside is not None
    forkserver = backtracking._aside._running()
    forkserver._process.kill()
    forkserver._process.wait()
    assert backtracking.encode("abc") == [0, 1, 2]


def test_no_more_wait_than_may(backtracking: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "MAX_WAITING", 0)
    with pytest.raises(Overloaded) as caught:
        backtracking.encode("abc", param="input")
    assert (caught.value.param, caught.value.code) == ("input", "queue_full")


def test_a_normalizer_that_grows_ends_that_text_alone(tmp_path: Path) -> None:
    loaded = load(tmp_path, file(normalizer=growing(8)))
    with pytest.raises(InvalidRequest, match="more time or memory") as caught:
        loaded.encode("a" * 61)
    assert (caught.value.param, caught.value.code) == ("prompt", "tokenizer_limit")
    assert loaded.encode("bc") == [1, 2]


def test_a_long_text_that_may_grow_is_looked_at_in_small_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A normalizer within the bounds, of 60 characters for one: a part of 8 a token would be 60 times as many."""
    loaded = load(tmp_path, file(normalizer=replace({"String": "a"}, "a" * 60)))
    assert not loaded.uses_own_process
    read: list[int] = []
    encode = loaded._encode

    def counted(text: str, *arguments: Any) -> list[int]:
        read.append(len(text))
        return encode(text, *arguments)

    monkeypatch.setattr(loaded, "_encode", counted)
    with pytest.raises(InvalidRequest) as caught:
        loaded.encode("a" * 100_000, max_tokens=1000)
    assert caught.value.code == "context_length_exceeded"
    assert sum(read) <= tokenizer.MIN_PROBE_TOKENS
    assert loaded.encode("b" * 2000, max_tokens=2000) == [1] * 2000


def test_what_fails_in_its_own_process_is_named_at_load(tmp_path: Path) -> None:
    state = file(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split("(a+)+$"), {"type": "FixedLength", "length": 0}]}
    )
    with pytest.raises(CheckpointError, match="chunk size") as caught:
        load(tmp_path, state)
    assert (caught.value.file, caught.value.tensor) == ("tokenizer.json", "pre_tokenizer")


def test_what_takes_too_much_to_load_names_the_component_in_doubt(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="more time or memory") as caught:
        load(tmp_path, file(normalizer=growing(9, "e")))
    assert (caught.value.file, caught.value.tensor) == ("tokenizer.json", "normalizer")


def test_an_error_of_the_library_is_the_texts(tmp_path: Path) -> None:
    """Holds for a tokenizer that is used where it is, too: this one knows only the short text that it is tried with."""
    words = {"type": "WordLevel", "unk_token": "?", "vocab": {"A probe: 1 é 中 😀": 0}}
    loaded = load(tmp_path, file(model=words))
    with pytest.raises(InvalidRequest, match="cannot read it") as caught:
        loaded.encode("another", param="input")
    assert (caught.value.param, caught.value.code) == ("input", "tokenizer_refused")


def test_ids_do_not_change_by_chance(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "dropout": 0.5}
    loaded = load(tmp_path, file(model=model))
    assert loaded.encode("ab" * 50) == [2] * 50


def test_nothing_is_started_before_it_is_needed(tmp_path: Path) -> None:
    loaded = load(tmp_path, file())
    loaded.encode("abc")
    assert isinstance(loaded._aside, TokenizerProcess)
    assert loaded._aside._forkserver is None


# --- texts that are read aside for their white space ---


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("spaced")
    return load(folder, file(pre_tokenizer=split(r"\s+$")), chat_template="{{ messages[0]['content'] }}")


def test_ordinary_texts_stay_where_white_space_alone_is_in_doubt(spaced: Tokenizer) -> None:
    assert not spaced.uses_own_process
    assert spaced.encode("a " * 1000) == [0, 8] * 1000
    assert spaced.chat([{"role": "user", "content": "a" + " " * 900 + "b"}]) == [0, *[8] * 900, 1]
    assert spaced._aside is not None
    assert spaced._aside._forkserver is None
    long = "a" + " " * 1100 + "b"
    assert isinstance(spaced.begin_encode(long), Future)
    assert spaced.chat([{"role": "user", "content": long}]) == [0, *[8] * 1100, 1]


def test_a_long_run_of_white_space_is_refused_alone(spaced: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        spaced.encode("a" + " " * 200_000 + "b")
    assert (caught.value.param, caught.value.code) in [("prompt", "tokenizer_limit"), ("prompt", "tokenizer_refused")]


# --- the line of those who wait ---


class HeldAside(TokenizerProcess):
    """A child whose requests wait until they are let go; their order is kept."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begun, self.go = threading.Event(), threading.Event()
        self.read: list[str] = []

    def _running(self) -> Any:
        return self

    def call(self, request: bytes) -> dict[str, Any]:
        self.begun.set()
        assert self.go.wait(60)
        self.read.append(json.loads(request)["arguments"]["text"])
        return {"ids": [1]}

    def begin_text(self, text: str, tenant: str) -> Future[list[int]]:
        too_much = InvalidRequest("too much", param="prompt")
        return self.begin("encode", {"text": text}, tenant=tenant, param="prompt", too_much=too_much)


def test_no_tenant_has_more_than_half_of_the_places_and_they_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_process, "MAX_WAITING", 20)
    monkeypatch.setattr(tokenizer_process, "MAX_RUNNING", 1)
    aside = HeldAside(tmp_path)
    waiting = [aside.begin_text(f"a{i}", "a") for i in range(10)]
    assert aside.begun.wait(60)  # the first stands in line no more
    waiting.append(aside.begin_text("a10", "a"))
    with pytest.raises(Overloaded, match="of yours"):
        aside.begin_text("a11", "a")
    waiting += [aside.begin_text(f"b{i}", "b") for i in range(9)]
    left = aside.begin_text("left", "b")
    assert left.cancel()
    aside.go.set()
    assert [ids.result() for ids in waiting] == [[1]] * len(waiting)
    assert "left" not in aside.read
    assert aside.read == ["a0", *(text for i in range(9) for text in (f"a{i + 1}", f"b{i}")), "a10"]


# --- templates that take long ---


@pytest.fixture
def slow(tmp_path: Path) -> Tokenizer:
    """A chat of "slow" takes its template about a tenth of a second, a moment longer than others wait for."""
    rounds = "{% for i in range(60000) %}{% set x = i + 1 %}{% endfor %}"
    source = "{% if 'slow' == messages[0].content %}" + rounds + "{% endif %}abc"
    return load(tmp_path, file(), chat_template=source)


def test_a_chat_that_takes_long_is_read_aside_and_comes_out_the_same(
    slow: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside = slow._aside
    assert aside is not None
    assert slow.chat([{"role": "user", "content": "quick"}]) == [0, 1, 2]
    assert aside._forkserver is None
    monkeypatch.setattr(tokenizer, "QUICK_S", 0.001)
    assert slow.chat([{"role": "user", "content": "slow"}]) == [0, 1, 2]
    assert aside._forkserver is not None
    assert slow.chat([{"role": "user", "content": "quick"}]) == [0, 1, 2]


def test_many_chats_with_many_tools_at_once_are_all_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that none was left to finish where it is: they wait, and nobody is refused."""
    rounds = "{% for i in range(200) %}{% set x = i + 1 %}{% endfor %}{{ tool.function.name }}"
    loaded = load(tmp_path, file(), chat_template="{% for tool in tools %}" + rounds + "{% endfor %}bc")
    monkeypatch.setattr(tokenizer, "_quick_s", lambda *_, **__: 0.0001)
    tools = [{"type": "function", "function": {"name": "a", "parameters": {}}}] * 40
    chat = partial(loaded.begin_chat, [{"role": "user", "content": "a"}], tools=tools)
    with ThreadPoolExecutor(32) as threads:
        begun = [future.result() for future in [threads.submit(chat) for _ in range(32)]]
    assert any(isinstance(ids, Future) for ids in begun)
    assert [ids.result() if isinstance(ids, Future) else ids for ids in begun] == [[0] * 40 + [1, 2]] * 32


@pytest.mark.parametrize(("messages", "tools", "takes_s"), [(1, 0, 0.001), (2, 20, 0.0197), (2, 64, 0.072)])
def test_a_chat_has_the_time_that_ordinary_ones_need_on_slower_machines(
    messages: int, tools: int, takes_s: float
) -> None:
    assert tokenizer._quick_s(messages, tools, wary=False) > 5 * takes_s
    assert tokenizer._quick_s(messages, tools, wary=True) > 2 * takes_s
    assert tokenizer._quick_s(10**6, 10**6, wary=True) == tokenizer.MAX_QUICK_S


def test_without_another_process_a_chat_takes_as_long_as_it_may(slow: Tokenizer, tmp_path: Path) -> None:
    alone = Tokenizer.load(tmp_path, aside=False)
    assert alone.chat([{"role": "user", "content": "slow"}]) == [0, 1, 2]
