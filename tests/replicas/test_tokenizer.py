"""Tokenizer: the same ids and text as the library and transformers give, exact bytes, refusals by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st

from motley.replicas.errors import CheckpointError, InvalidRequest
from motley.replicas.text.tokenizer.tokenizer import Tokenizer

STYLES = ["qwen", "llama3", "llama2", "mistral"]
TEXTS = [
    "The with statement wraps a block.",
    " leading and  double   spaces \n\n\tand tabs",
    "naïve café – “quotes” 中文 😀👩‍👩‍👧 \x00 end ",
    "x = {'a': 1}\n    return x\n",
    "A long text goes another way through the library. 😀\n" * 100,
]


@pytest.fixture(scope="session")
def loaded(tokenizer_folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {style: Tokenizer.load(folder) for style, folder in tokenizer_folders.items()}


@pytest.fixture
def folder(tokenizer_folders: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tokenizer_folders["qwen"], tmp_path / "copy"))


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("style", STYLES)
def test_same_ids_and_text_as_transformers(
    style: str, text: str, loaded: dict[str, Tokenizer], tokenizer_folders: dict[str, Path]
) -> None:
    peer = transformers.AutoTokenizer.from_pretrained(tokenizer_folders[style])
    tokenizer = loaded[style]
    for special in (True, False):
        ids = tokenizer.encode(text, add_special_tokens=special)
        assert ids == peer.encode(text, add_special_tokens=special)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == peer.decode(ids, skip_special_tokens=skip)
    assert tokenizer.special_ids == {i for i, token in peer.added_tokens_decoder.items() if token.special}
    assert tokenizer.vocab_size == len(peer)


@pytest.mark.parametrize("style", STYLES)
def test_text_round_trips(style: str, loaded: dict[str, Tokenizer]) -> None:
    for text in TEXTS:
        text = text.strip(" ")  # a sentencepiece vocabulary adds one space and drops it
        assert loaded[style].decode(loaded[style].encode(text)) == text


@given(ids=st.lists(st.integers(0, 699), max_size=30), skip=st.booleans())
def test_decodes_any_ids_as_the_library_does(
    ids: list[int], skip: bool, loaded: dict[str, Tokenizer], tokenizer_folders: dict[str, Path]
) -> None:
    for style in ("qwen", "llama3"):
        peer = tokenizers.Tokenizer.from_file(str(tokenizer_folders[style] / "tokenizer.json"))
        assert loaded[style].decode(ids, skip) == peer.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(0, 499), max_size=30), skip=st.booleans())
def test_decodes_any_words_of_a_sentencepiece_vocabulary_as_the_library_does(
    ids: list[int], skip: bool, loaded: dict[str, Tokenizer], tokenizer_folders: dict[str, Path]
) -> None:
    for style in ("llama2", "mistral"):
        peer = tokenizers.Tokenizer.from_file(str(tokenizer_folders[style] / "tokenizer.json"))
        assert loaded[style].decode(ids, skip) == peer.decode(ids, skip_special_tokens=skip)


def test_a_bad_byte_spoils_only_itself(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["llama2"]
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") or 0 for byte in "é".encode() + b"\xff\xe2\x82"]
    assert tokenizer.decode(ids) == "é\ufffd\ufffd\ufffd"


@pytest.mark.parametrize("style", STYLES)
def test_token_bytes_are_exact(style: str, loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded[style]
    text = "a 😀 naïve\ntext"
    joined = b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text, add_special_tokens=False))
    assert joined.decode().removeprefix(" ") == text
    assert all(len(tokenizer.token_text(i)) <= tokenizer.longest_token_chars for i in range(tokenizer.vocab_size))


def test_ids_outside_the_vocabulary_add_nothing(loaded: dict[str, Tokenizer]) -> None:
    assert loaded["qwen"].token_bytes(10**6) == b""
    assert loaded["qwen"].decode([10**6]) == ""


def test_special_text_in_a_prompt_is_special(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["qwen"]
    assert tokenizer.token_id("<|im_end|>") in tokenizer.encode("a<|im_end|>b")


def test_lone_surrogate_is_refused_by_name(loaded: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        loaded["qwen"].encode("a\ud800b", param="input")
    assert caught.value.param == "input"


@pytest.mark.parametrize("text", ["7" * 1_000_000, "中" * 1_000_000, "ab" * 500_000])
def test_a_megabyte_without_a_space_is_refused_before_it_is_tokenized(
    text: str, loaded: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, seen = loaded["qwen"], []
    encode = tokenizer._encode
    monkeypatch.setattr(tokenizer, "_encode", lambda text, *more: (seen.append(len(text)), encode(text, *more))[1])
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode(text, max_tokens=2048)
    assert caught.value.code == "context_length_exceeded"
    assert sum(seen) < 20_000


SPECIAL = "<|im_end|>"


def special_ids(tokenizer: Tokenizer, way: str, times: int, max_tokens: int | None) -> list[int]:
    """Return the ids of a special token's text, which stays text, so many times."""
    if way == "chat":
        return tokenizer.chat([{"role": "user", "content": SPECIAL * times}], max_tokens=max_tokens)
    return tokenizer.encode(SPECIAL * times, parse_special=False, max_tokens=max_tokens, param="input")


@pytest.fixture
def tokenized(loaded: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that the library has tokenized."""
    tokenizer, seen = loaded["qwen"], []
    encode = tokenizer._encode
    monkeypatch.setattr(tokenizer, "_encode", lambda text, *more: (seen.append(text), encode(text, *more))[1])
    return seen


@pytest.mark.parametrize("times", [90, 100_000])
@pytest.mark.parametrize("way", ["text", "chat"])
def test_text_of_special_tokens_is_tokenized_up_to_where_it_is_too_long(
    way: str, times: int, loaded: dict[str, Tokenizer], tokenized: list[str]
) -> None:
    """Each of them is several tokens; a hundred thousand are not all tokenized to find that out."""
    with pytest.raises(InvalidRequest) as caught:
        special_ids(loaded["qwen"], way, times, 100)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == ("messages" if way == "chat" else "input")
    assert sum(map(len, tokenized)) <= 2000


@pytest.mark.parametrize("way", ["text", "chat"])
def test_text_of_special_tokens_that_fits_passes(way: str, loaded: dict[str, Tokenizer]) -> None:
    fits = special_ids(loaded["qwen"], way, 20, None)
    assert special_ids(loaded["qwen"], way, 20, len(fits)) == fits
    with pytest.raises(InvalidRequest, match="maximum context length"):
        special_ids(loaded["qwen"], way, 200, len(fits))


def test_a_long_text_behind_that_of_a_special_token_is_not_tokenized(
    loaded: dict[str, Tokenizer], tokenized: list[str]
) -> None:
    text = " " * 8 * 100 + SPECIAL + "中" * 1_000_000
    with pytest.raises(InvalidRequest, match=r"^input: "):
        loaded["qwen"].encode(text, parse_special=False, max_tokens=100, param="input")
    assert sum(map(len, tokenized)) < 20_000


def test_a_long_text_that_may_fit_passes(loaded: dict[str, Tokenizer]) -> None:
    text = " " * 5000  # many characters, few tokens
    ids = loaded["qwen"].encode(text)
    assert loaded["qwen"].encode(text, max_tokens=len(ids)) == ids


def test_truncation_and_padding_in_the_file_are_not_obeyed(folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]
    assert len(tokenizer.encode("a")) == 1


def test_tokens_that_only_the_config_knows_are_added(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {"700": {"content": "<|tool|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("a<|tool|>")[-1] == 700
    assert tokenizer.vocab_size == 701
    assert 700 in tokenizer.special_ids


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a z"]}}'),
        ("tokenizer.json", b'{"model": null}'),
        ("tokenizer.json", b'{"model": {"type": "BPE", "continuing_subword_prefix": "x"}}'),
        ("tokenizer_config.json", b"[1]"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b'{"eos_token": 3}'),
        ("tokenizer_config.json", rb'{"eos_token": "\ud800"}'),
        ("tokenizer_config.json", rb'{"chat_template": "\ud800"}'),
        ("tokenizer_config.json", b'{"chat_template": 3}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"9000": {"content": "<|far|>"}}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {}}}'),
        ("tokenizer_config.json", b'{"additional_special_tokens": "<x>"}'),
        ("chat_template.jinja", b"{% for"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_corrupt_file_is_named(folder: Path, file: str, content: bytes) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(folder)
    assert caught.value.file == file


@pytest.mark.parametrize("change", [{"special_tokens": {}}, {"ids": [9000]}])
def test_a_file_that_fails_only_in_use_is_named(
    change: dict[str, Any], tokenizer_folders: dict[str, Path], tmp_path: Path
) -> None:
    state = json.loads((tokenizer_folders["llama3"] / "tokenizer.json").read_text())
    processor = state["post_processor"]
    (processor if "special_tokens" in change else processor["special_tokens"]["<|begin_of_text|>"]).update(change)
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.file == "tokenizer.json"


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    assert not Tokenizer.is_in(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_vocabulary_files_alone_are_converted(folder: Path) -> None:
    state = json.loads((folder / "tokenizer.json").read_text())
    expected = Tokenizer.load(folder).encode("The with statement")
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(state["model"]["vocab"]))
    merges = [" ".join(pair) for pair in state["model"]["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.is_in(folder)
    assert Tokenizer.load(folder).encode("The with statement") == expected


def test_an_unknown_decoder_is_refused_by_name(folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="WordPiece"):
        Tokenizer.load(folder)
