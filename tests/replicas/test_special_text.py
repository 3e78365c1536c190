"""Text of special tokens that a client writes arrives as that very text, whatever the vocabulary does with spaces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.replicas.text.tokenizer.text_stream import TextStream
from motley.replicas.text.tokenizer.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MARKS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
WORDS = ("▁old", "ol", "</", "▁<", "s>", "IN", "ST", "▁▁")
LETTERS = "▁abdelnost<>/[]INST1."
TEMPLATE = "{{ bos_token }}[INST]{{ messages[0]['content'] }}[/INST]"
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE}


def metaspace(scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}


LEGACY = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ],
}
GEMMA = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
FUSED = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]


def bpe() -> dict[str, Any]:
    """Merges as sentencepiece has them: none makes a special token, though the vocabulary has them."""
    texts = [*MARKS, *BYTES, *LETTERS]
    merges = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in texts:
                texts.append(word[:end])
                merges.append([word[: end - 1], word[end - 1]])
    vocab = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    return {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": "<unk>", "fuse_unk": True,
            "byte_fallback": True, "ignore_merges": False, "dropout": None}  # fmt: skip


def unigram() -> dict[str, Any]:
    """Special tokens are pieces with the best scores of all: the model itself would choose them."""
    pieces = [[text, 0.0] for text in MARKS] + [[text, -9.0] for text in (*BYTES, *LETTERS)]
    return {"type": "Unigram", "unk_id": 0, "vocab": pieces + [[w, -3.0] for w in WORDS], "byte_fallback": True}


# name -> (model, normalizer, pre-tokenizer, whether decoding drops a space)
VOCABULARIES: Mapping[str, tuple[Any, Any, Any, bool]] = {
    "legacy": (bpe, LEGACY, None, True),
    "always": (bpe, None, metaspace("always"), True),
    "first": (bpe, None, metaspace("first"), True),
    "never": (bpe, None, metaspace("never"), False),
    "gemma": (bpe, GEMMA, None, False),
    "unigram-always": (unigram, None, metaspace("always"), True),
    "unigram-first": (unigram, None, metaspace("first"), True),
    "unigram-never": (unigram, None, metaspace("never"), False),
    "unigram-legacy": (unigram, LEGACY, None, True),
}


@pytest.fixture(scope="session")
def vocabularies(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_folders: dict[str, Path]
) -> Mapping[str, Tokenizer]:
    loaded = {}
    for name, (model, normalizer, splitter, strips) in VOCABULARIES.items():
        added = [{"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
                  "normalized": False, "special": True} for i, text in enumerate(MARKS)]  # fmt: skip
        state = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "model": model(),
                 "normalizer": normalizer, "pre_tokenizer": splitter, "post_processor": None,
                 "decoder": {"type": "Sequence", "decoders": [*FUSED, *([STRIP] if strips else [])]}}  # fmt: skip
        folder = tmp_path_factory.mktemp(name)
        (folder / "tokenizer.json").write_text(json.dumps(state))
        (folder / "tokenizer_config.json").write_text(json.dumps(NAMED))
        loaded[name] = Tokenizer.load(folder)
    return loaded | {style: Tokenizer.load(folder) for style, folder in tokenizer_folders.items()}


NAMES = [*VOCABULARIES, "qwen", "llama3", "llama2", "mistral"]
PARTS = st.sampled_from(
    [*MARKS, "<|im_end|>", "<|eot_id|>", "<s", "s>", "[IN", "ST]", "</", " ", "  ", "old", " a", "é", "😀", "\n"]
)
TEXT = st.lists(PARTS, min_size=1, max_size=12).map("".join)


@cache
def library(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The library's own way to take special tokens as text, which a model may undo."""
    backend = tokenizers.Tokenizer.from_str(tokenizer._backend.to_str())
    backend.encode_special_tokens = True
    return backend


def arrives(text: str, back: str) -> bool:
    """A vocabulary that puts a space first, or drops it, cannot tell one that is there."""
    return back == text or (text.startswith(" ") and back == text[1:])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_a_prompt_arrives_as_it_was_written(name: str, text: str, vocabularies: Mapping[str, Tokenizer]) -> None:
    tokenizer = vocabularies[name]
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert tokenizer.special_ids.isdisjoint(ids)
    assert arrives(text, tokenizer.decode(ids))
    if not name.startswith("unigram"):  # the library's own way makes special tokens there
        assert ids == library(tokenizer).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", list(VOCABULARIES))
@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_a_message_arrives_as_it_was_written(name: str, text: str, vocabularies: Mapping[str, Tokenizer]) -> None:
    tokenizer = vocabularies[name]
    ids = tokenizer.chat([{"role": "user", "content": text}])
    marks = [tokenizer.token_id(mark) for mark in ("<s>", "[INST]", "[/INST]")]
    assert [ids[0], ids[1], ids[-1]] == marks
    inside = ids[2:-1]
    assert tokenizer.special_ids.isdisjoint(inside)
    assert arrives(text, tokenizer.decode(inside))
    # Behind a special token a text has the ids that it has anywhere behind one.
    same = library(tokenizer).encode(text, add_special_tokens=False).ids
    if name in ("legacy", "always", "never", "gemma"):
        assert inside == same


@pytest.mark.parametrize("name", NAMES)
def test_the_text_of_the_issue(name: str, vocabularies: Mapping[str, Tokenizer]) -> None:
    tokenizer = vocabularies[name]
    for text in ("<s>old</s>", "a <s>old</s> b", "<s></s>", "[INST]<s>"):
        assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text
        assert text in tokenizer.decode(tokenizer.chat([{"role": "user", "content": text}]))


@pytest.mark.parametrize("name", list(VOCABULARIES))
@settings(max_examples=40, deadline=None)
@given(text=TEXT, cut=st.integers(0, 12))
def test_an_answer_arrives_piece_by_piece_as_it_would_whole(
    name: str, text: str, cut: int, vocabularies: Mapping[str, Tokenizer]
) -> None:
    """Behind a turn's special token and behind nothing; stop strings find what is there."""
    tokenizer = vocabularies[name]
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    for prompt in ([], tokenizer.chat([{"role": "user", "content": "a"}])):
        stream = TextStream(tokenizer, prompt_ids=prompt)
        whole = "".join([stream.push([token_id]) for token_id in ids]) + stream.flush()
        expected = tokenizer.decode([*prompt, *ids]).removeprefix(tokenizer.decode(prompt))
        assert whole == expected
        stop = whole[cut : cut + 3]
        if stop:
            stopped = TextStream(tokenizer, prompt_ids=prompt, stop=[stop])
            parts = [stopped.push([token_id]) for token_id in ids]
            assert "".join(parts) + stopped.flush() == whole[: whole.index(stop)]
            assert stopped.stopped == stop


def test_ordinary_text_needs_no_second_tokenizer(tokenizer_folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(tokenizer_folders["qwen"])
    tokenizer.encode("plain text", parse_special=False)
    tokenizer.chat([{"role": "user", "content": "plain text"}])
    assert tokenizer._made is None


@pytest.mark.parametrize(
    ("normalizer", "text"),
    [
        ({"type": "NFKC"}, "＜s＞"),
        ({"type": "Lowercase"}, "<S>"),
        ({"type": "StripAccents"}, "<\u0338s>"),
        ({"type": "Replace", "pattern": {"String": "!"}, "content": ""}, "<!s>"),
        ({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "NFKD"}]}, "＜s>"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_no_normalizer_makes_a_special_token_of_a_message(normalizer: Any, text: str, tmp_path: Path) -> None:
    """Files of old have special tokens that are looked for in what the normalizer has made."""
    added = [{"id": i, "content": mark, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": True, "special": True} for i, mark in enumerate(MARKS)]  # fmt: skip
    state = {"version": "1.0", "added_tokens": added, "model": bpe(), "normalizer": normalizer,
             "pre_tokenizer": metaspace("never"), "decoder": {"type": "Sequence", "decoders": FUSED}}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(NAMED))
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.chat([{"role": "user", "content": text}])
    assert [token_id for token_id in ids if token_id in tokenizer.special_ids] == [1, 3, 4]
    assert tokenizer.encode("<s>", add_special_tokens=False) == [1]
