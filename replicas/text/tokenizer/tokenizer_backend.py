"""Backend of a tokenizer: a folder's tokenizer.json as the library's object, checked and completed by the files beside
it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from ...checkpoint.files.checkpoint_folder import has_entry, open_checkpoint_file
from ...checkpoint.files.unsupported_formats import explain_tokenizer
from ...errors import CheckpointError, InvalidRequest
from .tokenizer_cost import component_steps
from .tokenizer_files import TOKENIZER_CONFIG, TokenizerConfig, read_text_file

TOKENIZER_FILE = "tokenizer.json"
OLDER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
LIBRARY_SUFFIXES = (".json", ".txt", ".model", ".jinja")  # files of a tokenizer that transformers reads
MAX_FILE_BYTES = 512 * 2**20
PROBE = "A probe: 1 é 中 😀"
MAX_SAID = 300  # most characters of the library's own message that are shown
COMPONENTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens", "model")

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # flags of an added token

TokenizerState = dict[str, Any]


def read_tokenizer_state(folder: Path) -> tuple[str, TokenizerState]:
    """Return tokenizer.json as text and as parsed JSON. Raises CheckpointError naming the file and the component."""
    text = (
        read_text_file(folder, TOKENIZER_FILE, MAX_FILE_BYTES)
        if has_entry(folder, TOKENIZER_FILE)
        else _convert(folder)
    )
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not a tokenizer: {error}", file=TOKENIZER_FILE) from error
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(model, dict):
        raise CheckpointError("not a tokenizer: expected an object with a model", file=TOKENIZER_FILE, tensor="model")
    if model.get("continuing_subword_prefix") and "merges" in model:
        # The library ends the whole process when merges do not fit the prefix.
        raise CheckpointError("continuing_subword_prefix is not supported", file=TOKENIZER_FILE, tensor="model")
    if not model.get("vocab"):
        raise CheckpointError("has an empty vocabulary", file=TOKENIZER_FILE, tensor="model")
    return text, state


def decode_only_state(state: TokenizerState) -> tuple[str, TokenizerState]:
    """Return the same vocabulary without steps on texts, so that it can only turn ids into text."""
    only = {**state, "normalizer": None, "pre_tokenizer": None, "post_processor": None}
    return json.dumps(only), only


def load_backend(text: str, state: TokenizerState) -> tokenizers.Tokenizer:
    """Return the library's tokenizer. Raises CheckpointError naming the component that the library refuses."""
    try:
        return tokenizers.Tokenizer.from_str(text)
    except BaseException as error:  # raised again below if it is not the library's
        _reraise_foreign_panic(error)
        raise CheckpointError(
            f"not a tokenizer: {_library_message(error)}", file=TOKENIZER_FILE, tensor=_at_fault(state)
        ) from error


def _at_fault(state: TokenizerState) -> str:
    """Return the component without which the rest can be read; "" if there is none."""
    empty: TokenizerState = {"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    for component in COMPONENTS:
        if component in state and _loads(json.dumps({**state, component: empty.get(component)})):
            return component
    return ""


def _loads(text: str) -> bool:
    try:
        tokenizers.Tokenizer.from_str(text)
    except BaseException as error:  # noqa: BLE001  # raised again if it is not the library's
        _reraise_foreign_panic(error)
        return False
    return True


def library_refusal(error: BaseException, param: str) -> InvalidRequest:
    """Return the client's error for an error of the library, which has no type of its own; its panics are not even
    Exceptions.

    Raises the error itself if it is not the library's.
    """
    _reraise_foreign_panic(error)
    message = f"{param}: the model's tokenizer cannot read it: {_library_message(error)}"
    return InvalidRequest(message, param=param, code="tokenizer_refused")


def _reraise_foreign_panic(error: BaseException) -> None:
    """Raise the error again unless it may be the library's: its panics derive only from BaseException, like some
    others.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def _library_message(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:MAX_SAID]


def probe_tokenizer(backend: tokenizers.Tokenizer, vocab_size: int) -> None:
    """Tokenize a short text, since some faults of a file show only in use, and that is better than in the first
    request. Raises CheckpointError.
    """
    try:
        ids = backend.encode(PROBE, add_special_tokens=True).ids
    except BaseException as error:
        _reraise_foreign_panic(error)
        message = f"cannot tokenize a short text: {_library_message(error)}"
        raise CheckpointError(message, file=TOKENIZER_FILE, tensor=_at_fault_in_use(backend)) from error
    if max(ids, default=0) >= vocab_size:
        raise CheckpointError(f"gives id {max(ids)} beyond its own vocabulary of {vocab_size}", file=TOKENIZER_FILE)


def _at_fault_in_use(backend: tokenizers.Tokenizer) -> str:
    """Return the component without which a short text can be tokenized, or else the model."""
    state = json.loads(backend.to_str())
    # In their order: an earlier one upsets later ones.
    for component in ("normalizer", "pre_tokenizer", "post_processor"):
        if state.get(component) is not None and _encodes(json.dumps({**state, component: None})):
            return component
    return "model"


def _encodes(text: str) -> bool:
    try:
        tokenizers.Tokenizer.from_str(text).encode(PROBE)
    except BaseException as error:  # noqa: BLE001  # raised again if it is not the library's
        _reraise_foreign_panic(error)
        return False
    return True


def _convert(folder: Path) -> str:
    """Convert a sentencepiece model or vocabulary files, which older checkpoints have instead, to tokenizer.json by
    means of transformers.
    """
    if (error := explain_tokenizer(folder)) is not None:
        raise error
    if not any(has_entry(folder, name) for name in OLDER_FILES):
        raise CheckpointError("missing; the folder holds no other tokenizer either", file=TOKENIZER_FILE)
    for name in sorted(entry.name for entry in folder.iterdir() if entry.suffix in LIBRARY_SUFFIXES):
        with open_checkpoint_file(folder, name):  # checks the file, which the library opens unchecked
            pass
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder), use_fast=True, trust_remote_code=False, local_files_only=True
        )
        backend: tokenizers.Tokenizer = tokenizer.backend_tokenizer
    except Exception as error:  # many kinds, none of them documented
        raise CheckpointError(f"missing, and transformers cannot make one: {error}", file=TOKENIZER_FILE) from error
    return str(backend.to_str())


def implied_tokens(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> dict[str, str]:
    """Return names of tokens that the files beside tokenizer.json leave out, if the vocabulary has such tokens."""
    padding = backend.padding
    implied = {**config.implied, **({"pad_token": str(padding["pad_token"])} if padding else {})}
    return {name: text for name, text in implied.items() if backend.token_to_id(text) is not None}


def add_missing_tokens(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> tokenizers.Tokenizer:
    """Return the tokenizer with tokens that only the files beside it know, and with their flags for tokens that it has.

    Raises CheckpointError for an id that is another token's. The given tokenizer may be changed.
    """
    added_tokens = backend.get_added_tokens_decoder()
    otherwise: dict[str, dict[str, bool]] = {}
    for token_id, entry in config.added.items():
        chosen = {flag: bool(entry[flag]) for flag in _FLAGS if flag in entry}
        token = tokenizers.AddedToken(entry["content"], **chosen)
        if token_id in added_tokens and added_tokens[token_id].content == token.content:
            if config.added_file == TOKENIZER_CONFIG:  # tokenizer.json says more than the older file
                otherwise[token.content] = {flag: getattr(token, flag) for flag in _FLAGS}
            continue
        backend.add_tokens([token])
        if (found := backend.token_to_id(entry["content"])) != token_id:
            raise CheckpointError(
                f"token {entry['content']!r} cannot have id {token_id}: with {TOKENIZER_FILE} it has id {found}",
                file=config.added_file,
                tensor="added_tokens_decoder" if config.added_file == TOKENIZER_CONFIG else "",
            )
    backend = _with_flags(backend, otherwise)
    added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    for text in config.special:
        if text not in added:
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])
    plainly = dict.fromkeys(_FLAGS, False) | {"special": True}
    backend = _with_flags(backend, {text: plainly for text in config.special if added.get(text) is False})
    return _found_as_written(backend) if _makes_other_text(backend.normalizer) else backend


def _with_flags(backend: tokenizers.Tokenizer, flags: Mapping[str, Mapping[str, bool]]) -> tokenizers.Tokenizer:
    """Return the tokenizer with other flags for some of its added tokens, by their text.

    Before release 0.23 the library ignores a token that is added once more.
    """
    added_tokens = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    if all(getattr(added_tokens[text], flag) == value for text, each in flags.items() for flag, value in each.items()):
        return backend
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        token |= flags.get(token["content"], {})
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _makes_other_text(normalizer: Any) -> bool:
    """Return whether a normalizer could turn other text into a special token's, such as full-width letters into
    `<s>`.
    """
    if normalizer is None:
        return False
    return not all(map(_spaces_only, component_steps(json.loads(normalizer.__getstate__()))))


def _spaces_only(normalizer: dict[str, Any]) -> bool:
    match normalizer:
        case {"type": "Prepend" | "Strip"} | {"type": "Replace", "pattern": {"String": " "}}:
            return True
    return False


def _found_as_written(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return the tokenizer with special tokens found only as written, never in what a normalizer makes of a client's
    text.
    """
    special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    return _with_flags(backend, {text: {"normalized": False} for text in special})
