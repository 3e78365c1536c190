"""A folder's tokenizer.json as the library's object: read, checked, completed by the files beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from .errors import CheckpointError, InvalidRequest
from .folder import is_there, open_file
from .other_formats import explain_tokenizer
from .tokenizer_bounds import steps
from .tokenizer_files import CONFIG, TokenizerConfig, read_text

__all__ = [
    "FILE",
    "OLDER_FILES",
    "add_missing",
    "implied_tokens",
    "load_backend",
    "probe",
    "read_state",
    "refusal",
    "without_steps",
]

FILE = "tokenizer.json"
OLDER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
LIBRARY_SUFFIXES = (".json", ".txt", ".model", ".jinja")  # what transformers reads of a tokenizer
MAX_FILE_BYTES = 512 * 2**20
PROBE = "A probe: 1 é 中 😀"
MAX_SAID = 300  # characters of the library's own words
COMPONENTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens", "model")

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token

State = dict[str, Any]


def read_state(folder: Path) -> tuple[str, State]:
    """tokenizer.json as text and as what it says. Raises CheckpointError naming the file and the component."""
    text = read_text(folder, FILE, MAX_FILE_BYTES) if is_there(folder, FILE) else _convert(folder)
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not a tokenizer: {error}", file=FILE) from error
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(model, dict):
        raise CheckpointError("not a tokenizer: expected an object with a model", file=FILE, tensor="model")
    if model.get("continuing_subword_prefix") and "merges" in model:
        # The library ends the whole process when merges do not fit the prefix.
        raise CheckpointError("continuing_subword_prefix is not supported", file=FILE, tensor="model")
    if not model.get("vocab"):
        raise CheckpointError("has an empty vocabulary", file=FILE, tensor="model")
    return text, state


def without_steps(state: State) -> tuple[str, State]:
    """The same vocabulary, with which ids become text and nothing is done to a text."""
    only = {**state, "normalizer": None, "pre_tokenizer": None, "post_processor": None}
    return json.dumps(only), only


def load_backend(text: str, state: State) -> tokenizers.Tokenizer:
    """Raises CheckpointError naming the component that the library refuses."""
    try:
        return tokenizers.Tokenizer.from_str(text)
    except BaseException as error:  # let go of below, where it is not the library's
        _let_go(error)
        raise CheckpointError(f"not a tokenizer: {_said(error)}", file=FILE, tensor=_at_fault(state)) from error


def _at_fault(state: State) -> str:
    """The component without which the rest can be read."""
    empty: State = {"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    for component in COMPONENTS:
        if component in state and _loads(json.dumps({**state, component: empty.get(component)})):
            return component
    return ""


def _loads(text: str) -> bool:
    try:
        tokenizers.Tokenizer.from_str(text)
    except BaseException as error:  # noqa: BLE001  # likewise
        _let_go(error)
        return False
    return True


def refusal(error: BaseException, param: str) -> InvalidRequest:
    """What a client hears of the library's error, which is of no kind of its own; its panics are no exceptions at all.

    Raises the error itself where it is not the library's.
    """
    _let_go(error)
    message = f"{param}: the model's tokenizer cannot read it: {_said(error)}"
    return InvalidRequest(message, param=param, code="tokenizer_refused")


def _let_go(error: BaseException) -> None:
    """A panic in the library derives from nothing narrower than BaseException; others of that kind are not its."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def _said(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:MAX_SAID]


def probe(backend: tokenizers.Tokenizer, vocab_size: int) -> None:
    """Some faults of a file show only when it is used: better now than in the first request."""
    try:
        ids = backend.encode(PROBE, add_special_tokens=True).ids
    except BaseException as error:
        _let_go(error)
        message = f"cannot tokenize a short text: {_said(error)}"
        raise CheckpointError(message, file=FILE, tensor=_at_fault_in_use(backend)) from error
    if max(ids, default=0) >= vocab_size:
        raise CheckpointError(f"gives id {max(ids)} beyond its own vocabulary of {vocab_size}", file=FILE)


def _at_fault_in_use(backend: tokenizers.Tokenizer) -> str:
    """The component without which a short text can be tokenized, or else the model."""
    state = json.loads(backend.to_str())
    for component in ("post_processor", "pre_tokenizer", "normalizer"):
        if state.get(component) is not None and _encodes(json.dumps({**state, component: None})):
            return component
    return "model"


def _encodes(text: str) -> bool:
    try:
        tokenizers.Tokenizer.from_str(text).encode(PROBE)
    except BaseException as error:  # noqa: BLE001  # likewise
        _let_go(error)
        return False
    return True


def _convert(folder: Path) -> str:
    """Older checkpoints have only a sentencepiece model or vocabulary files; transformers converts them to this one."""
    if (error := explain_tokenizer(folder)) is not None:
        raise error
    if not any(is_there(folder, name) for name in OLDER_FILES):
        raise CheckpointError("missing; the folder holds no other tokenizer either", file=FILE)
    for name in sorted(entry.name for entry in folder.iterdir() if entry.suffix in LIBRARY_SUFFIXES):
        with open_file(folder, name):  # the library opens what it likes, without looking
            pass
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder), use_fast=True, trust_remote_code=False, local_files_only=True
        )
        backend: tokenizers.Tokenizer = tokenizer.backend_tokenizer
    except Exception as error:  # many kinds, none of them documented
        raise CheckpointError(f"missing, and transformers cannot make one: {error}", file=FILE) from error
    return str(backend.to_str())


def implied_tokens(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> dict[str, str]:
    """Names of tokens that the files beside tokenizer.json leave out, as far as the vocabulary has such tokens."""
    padding = backend.padding
    implied = {**config.implied, **({"pad_token": str(padding["pad_token"])} if padding else {})}
    return {name: text for name, text in implied.items() if backend.token_to_id(text) is not None}


def add_missing(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> tokenizers.Tokenizer:
    """The tokenizer with tokens that only the files beside it know, and what they say otherwise of those that it has.

    Raises CheckpointError for an id that is another token's. The given one may be changed.
    """
    known = backend.get_added_tokens_decoder()
    otherwise: dict[str, dict[str, bool]] = {}
    for token_id, entry in config.added.items():
        chosen = {flag: bool(entry[flag]) for flag in _FLAGS if flag in entry}
        token = tokenizers.AddedToken(entry["content"], **chosen)
        if token_id in known and known[token_id].content == token.content:
            if config.added_file == CONFIG:  # of the older file tokenizer.json says more
                otherwise[token.content] = {flag: getattr(token, flag) for flag in _FLAGS}
            continue
        backend.add_tokens([token])
        if backend.token_to_id(entry["content"]) != token_id:
            raise CheckpointError(
                f"token {entry['content']!r} cannot have id {token_id}: {FILE} gives it another",
                file=config.added_file,
                tensor="added_tokens_decoder" if config.added_file == CONFIG else "",
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
    """The same with other flags of added tokens that it has, by their text.

    Before release 0.23 the library leaves a token as it is that is added once more.
    """
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    if all(getattr(known[text], flag) == value for text, each in flags.items() for flag, value in each.items()):
        return backend
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        token |= flags.get(token["content"], {})
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _makes_other_text(normalizer: Any) -> bool:
    """Whether a normalizer could make a special token's text of another one, such as `<s>` of full-width letters."""
    if normalizer is None:
        return False
    return not all(map(_spaces_only, steps(json.loads(normalizer.__getstate__()))))


def _spaces_only(normalizer: dict[str, Any]) -> bool:
    match normalizer:
        case {"type": "Prepend" | "Strip"} | {"type": "Replace", "pattern": {"String": " "}}:
            return True
    return False


def _found_as_written(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A special token counts where it is written, never in what a normalizer makes of a client's text."""
    special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    return _with_flags(backend, {text: {"normalized": False} for text in special})
