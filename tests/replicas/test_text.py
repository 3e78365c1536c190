"""TextStream: whole characters, no stop string leaked, the same text however the tokens arrive."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.replicas.sampling_params import MAX_STOP_STRINGS, SamplingParams
from motley.replicas.text.tokenizer.text_stream import TextStream
from motley.replicas.text.tokenizer.tokenizer import Tokenizer

STYLES = ["qwen", "llama3", "llama2", "mistral"]
TEXT = "The with statement 😀👩‍👩‍👧 wraps naïve 中文\n\n  blocks; abcabd aaab"


@pytest.fixture(scope="session")
def loaded(tokenizer_folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {style: Tokenizer.load(folder) for style, folder in tokenizer_folders.items()}


def _chunks(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def _run(stream: TextStream, chunks: list[list[int]]) -> str:
    return "".join([*map(stream.push, chunks), stream.flush()])


def _oracle(texts: list[str], stops: list[str], min_tokens: int) -> tuple[str, str | None, int]:
    """Read character by character; end at the first stop string that is complete, the longest if several."""
    text = ""
    for number, new in enumerate(texts, start=1):
        for char in new:
            text += char
            ended = [stop for stop in stops if text.endswith(stop)]
            if ended and number >= min_tokens:
                longest = max(ended, key=len)
                return text[: len(text) - len(longest)], longest, number
    return text, None, len(texts)


def _texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Return the texts that each token completes."""
    stream = tokenizer.detokenizer()
    return [stream.push([i]) for i in ids]


@given(ids=st.lists(st.integers(0, 755), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_pieces_join_to_the_decoded_whole(ids: list[int], cuts: list[int], loaded: dict[str, Tokenizer]) -> None:
    for tokenizer in loaded.values():
        for skip in (True, False):
            stream = TextStream(tokenizer, skip_special_tokens=skip)
            assert _run(stream, _chunks(ids, cuts)) == tokenizer.decode(ids, skip)
            assert stream.num_tokens == len(ids)


@pytest.mark.parametrize("style", STYLES)
def test_characters_divided_between_tokens_come_whole(style: str, loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded[style]
    stream = TextStream(tokenizer)
    sent = [stream.push([i]) for i in tokenizer.encode(TEXT, add_special_tokens=False)]
    assert "".join(sent) == TEXT
    assert "" in sent  # some tokens end within an emoji
    assert "\ufffd" not in "".join(sent)
    assert stream.flush() == ""


def test_an_unfinished_character_shows_only_at_the_end(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["qwen"]
    ids = tokenizer.encode("😀")[:-1]
    stream = TextStream(tokenizer)
    assert [stream.push([i]) for i in ids] == [""] * len(ids)
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


@pytest.mark.parametrize("style", STYLES)
def test_output_continues_its_prompt(style: str, loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded[style]
    ids = tokenizer.encode("The with statement 😀 works")
    whole = tokenizer.decode(ids)
    for cut in range(len(ids) + 1):
        begun = tokenizer.detokenizer()
        prompt = begun.push(ids[:cut])
        stream = TextStream(tokenizer, prompt_ids=ids[:cut])
        assert prompt + _run(stream, [[i] for i in ids[cut:]]) == whole


alphabet = st.text(alphabet="ab", min_size=1, max_size=4)
stops_of_two = st.lists(st.one_of(alphabet, st.sampled_from(["😀", "é", " ", "\ufffd", "the"])), max_size=9)


@given(
    text=st.text(alphabet="ab é😀", max_size=30),
    stops=stops_of_two,
    min_tokens=st.integers(0, 12),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    style=st.sampled_from(STYLES),
)
def test_stop_strings_end_the_text_however_tokens_arrive(
    text: str, stops: list[str], min_tokens: int, cuts: list[int], style: str, loaded: dict[str, Tokenizer]
) -> None:
    tokenizer = loaded[style]
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected, stopped, num_tokens = _oracle(_texts(tokenizer, ids), stops, min_tokens)
    for chunks in ([[i] for i in ids], _chunks(ids, cuts)):
        stream = TextStream(tokenizer, stop=stops, min_tokens=min_tokens)
        assert _run(stream, chunks) == expected
        assert (stream.stopped, stream.num_tokens) == (stopped, num_tokens)


@given(text=st.text(alphabet="ab", max_size=30), stops=st.lists(alphabet, min_size=1, max_size=9))
def test_no_more_is_held_back_than_could_begin_a_stop_string(
    text: str, stops: list[str], loaded: dict[str, Tokenizer]
) -> None:
    tokenizer = loaded["qwen"]
    stream = TextStream(tokenizer, stop=stops)
    sent = read = ""
    for token_id in tokenizer.encode(text):
        sent += stream.push([token_id])
        read += tokenizer.token_text(token_id)
        if stream.stopped is not None:
            break
        beginnings = [stop[:k] for stop in stops for k in range(len(stop)) if read.endswith(stop[:k])]
        assert sent == read[: len(read) - max(map(len, beginnings))]


@given(
    text=st.text(alphabet="ab é😀", max_size=24),
    stops=stops_of_two,
    min_tokens=st.integers(0, 6),
    style=st.sampled_from(STYLES),
)
def test_a_resumed_stream_sends_exactly_the_rest(
    text: str, stops: list[str], min_tokens: int, style: str, loaded: dict[str, Tokenizer]
) -> None:
    tokenizer = loaded[style]
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt = tokenizer.encode("x ")

    def fresh() -> TextStream:
        return TextStream(tokenizer, prompt_ids=prompt, stop=stops, min_tokens=min_tokens)

    whole = fresh()
    expected = _run(whole, [[i] for i in ids])
    for cut in range(len(ids) + 1):
        first, second = fresh(), fresh()
        sent = first.push(ids[:cut])
        second.replay(ids[:cut])
        assert sent + _run(second, [ids[cut:]]) == expected
        assert (second.stopped, second.num_tokens) == (whole.stopped, whole.num_tokens)


def test_as_many_stop_strings_as_may_be_given_are_looked_for(loaded: dict[str, Tokenizer]) -> None:
    """64 of them, as long together as they may be, of which most begin and none but the last but one is completed."""
    tokenizer, kept = loaded["qwen"], "a" * 20 + "b"
    stops = ["a" * (30 + i) + "c" for i in range(MAX_STOP_STRINGS - 2)] + ["bd", "ce"]
    assert len(SamplingParams(stop=stops).stop) == MAX_STOP_STRINGS
    for text, stopped in ((kept + "d tail", "bd"), (kept + "ce tail", "ce"), (kept, None), ("a" * 99 + "c", stops[61])):
        stream = TextStream(tokenizer, stop=stops)
        got = _run(stream, [[i] for i in tokenizer.encode(text)])
        assert (got, stream.stopped) == (text[: text.index(stopped)] if stopped else text, stopped)


def test_choices_with_the_same_stop_strings_share_what_looks_for_them(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["qwen"]
    first, second = (TextStream(tokenizer, stop=["ab", "abab"], min_tokens=9) for _ in range(2))
    ids = [tokenizer.encode(char)[0] for char in "aba"]
    assert (first.push(ids[:1]), second.push(ids[:2]), first.push(ids[1:])) == ("", "", "")
    assert (second.flush(), first.flush()) == ("ab", "aba")


def test_min_tokens_counts_where_the_stop_string_is_completed(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["qwen"]
    ids = [i for char in "xabyab" for i in tokenizer.encode(char)]
    assert len(ids) == 6
    for min_tokens, text in [(0, "x"), (3, "x"), (4, "xaby"), (6, "xaby"), (7, "xabyab")]:
        assert _run(TextStream(tokenizer, stop=["ab"], min_tokens=min_tokens), [ids]) == text


def test_of_stop_strings_that_end_at_once_the_longest_is_cut_off(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["qwen"]
    for stops in (["cd", "bcd", "d"], ["d", "bcd", "cd"]):
        stream = TextStream(tokenizer, stop=stops)
        assert stream.push([i for char in "abcdef" for i in tokenizer.encode(char)]) == "a"
        assert stream.stopped == "bcd"


def test_tokens_after_the_stop_string_are_not_taken(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["qwen"]
    ids = [i for char in "abcdef" for i in tokenizer.encode(char)]
    stream = TextStream(tokenizer, stop=["cd"])
    assert stream.push(ids) == "ab"
    assert (stream.stopped, stream.num_tokens) == ("cd", 4)
    assert stream.push(ids) == stream.flush() == ""
    assert stream.num_tokens == 4


def test_special_tokens_add_no_text_and_do_not_break_a_character(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["qwen"]
    first, *rest = tokenizer.encode("😀")
    special = min(tokenizer.special_ids)
    assert _run(TextStream(tokenizer), [[first, special, *rest]]) == "😀"
