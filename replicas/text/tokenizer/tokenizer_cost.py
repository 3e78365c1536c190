"""Check whether a tokenizer's own file bounds the time and memory that a text takes.

Most files do, and are used in this process. One that is not known to is no error: it is used in a process that can be
stopped.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from .regex_cost import RegexCost, regex_cost

MAX_GROWTH = 64  # most characters that a normalizer may make of one
MAX_STEPS = 32
MAX_ADDED = 1024  # most characters or tokens that may be put before or behind a text
MAX_WORD = 1000  # most characters of a word that WordPiece may look at again and again
MAX_PIECE = 512  # most characters of a piece that Unigram looks for at each place of a text; real ones have up to 100
_UNICODE = 18  # characters of U+FDFA in compatibility forms, the most of any; forms applied again make no more
_FORMS = {"NFC": 3, "NFD": 4, "NFKC": _UNICODE, "NFKD": _UNICODE, "BertNormalizer": 9, "Lowercase": 3, "ByteLevel": 4}
_LISTS = ("normalizers", "pretokenizers", "decoders", "processors")
_SAME = ("Strip", "StripAccents", "Nmt")
_SPLITTERS = ("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace",
              "Punctuation", "UnicodeScripts", "Whitespace", "WhitespaceSplit")  # fmt: skip

ComponentStep = dict[str, Any]


def component_steps(component: Any) -> Iterable[ComponentStep]:
    """Yield the parts of a normalizer, pre-tokenizer, decoder or post-processor, in order."""
    if not isinstance(component, dict):
        return
    parts = next((component[name] for name in _LISTS if isinstance(component.get(name), list)), None)
    if component.get("type") == "Sequence" and parts is not None:
        for part in parts:
            yield from component_steps(part)
    else:
        yield component


def step_growth(step: ComponentStep) -> float:
    """Return the most characters that a `Replace` step makes of one character. Raises KeyError if it says something
    unknown.
    """
    content, pattern = step["content"], step["pattern"]
    text = pattern.get("String")
    if text:
        return max(1.0, len(content) / len(text))
    return 1.0 + len(content)  # an empty match may stand before every character


def find_unbounded_component(state: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the component of a tokenizer.json that is not known to be bounded, and why; None if there is none."""
    checks: dict[str, Callable[[Any], str | None]] = {
        "normalizer": _normalizer,
        "pre_tokenizer": partial(_pre_tokenizer, short_runs=_keeps_runs(state.get("normalizer"))),
        "model": _model,
        "post_processor": _post_processor,
    }
    for component, check in checks.items():
        try:
            doubt = check(state.get(component))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            doubt = "it is written in a way that is not known here"
        if doubt is not None:
            return component, doubt
    return None


def slow_on_long_runs(state: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json without doubtful components is bounded only for texts without long runs of white
    space.
    """
    regexes = [
        step["pattern"].get("Regex") for step in component_steps(state.get("pre_tokenizer")) if step["type"] == "Split"
    ]
    return any(regex is not None and regex_cost(regex) is RegexCost.SHORT_RUNS for regex in regexes)


def _keeps_runs(normalizer: Any) -> bool:
    """Return whether the normalizer makes no run of white space longer, as it takes nothing out between two."""
    return all(step.get("type") == "NFC" for step in component_steps(normalizer))


def normalizer_growth(state: Mapping[str, Any]) -> float:
    """Return the most characters that the normalizer of a tokenizer.json without doubtful components makes of one, not
    counting what it puts before a text.
    """
    unicode_growth, factor = 1, 1.0
    for step in component_steps(state.get("normalizer")):
        kind = step["type"]
        if kind in _FORMS:
            unicode_growth = max(unicode_growth, _FORMS[kind])
        elif kind == "Replace":
            factor *= step_growth(step)
        elif kind == "Precompiled":
            factor *= _longest(step["precompiled_charsmap"])
    return factor * unicode_growth


def _normalizer(component: Any) -> str | None:
    found, before = list(component_steps(component)), 0
    if len(found) > MAX_STEPS:
        return f"it has {len(found)} steps"
    for step in found:
        kind = step["type"]
        if kind == "Replace":
            if (doubt := _pattern(step["pattern"])) is not None:
                return doubt
        elif kind == "Prepend":
            before += len(step["prepend"])
        elif kind not in (*_FORMS, *_SAME, "Precompiled"):
            return f"the step {kind} is not known here"
    made = normalizer_growth({"normalizer": component})
    if made > MAX_GROWTH or before > MAX_ADDED:
        return f"it may make {made + before:.3g} characters of one"
    return None


def _pre_tokenizer(component: Any, *, short_runs: bool) -> str | None:
    found = list(component_steps(component))
    if len(found) > MAX_STEPS:
        return f"it has {len(found)} steps"
    for step in found:
        if step["type"] == "Split":
            if (doubt := _pattern(step["pattern"], short_runs=short_runs)) is not None:
                return doubt
        elif step["type"] not in _SPLITTERS:
            return f"the step {step['type']} is not known here"
    return None


def _pattern(pattern: Mapping[str, Any], *, short_runs: bool = False) -> str | None:
    """Return the doubt about a pattern, if there is one. short_runs: texts with long runs of white space are read
    elsewhere.
    """
    regex = pattern.get("Regex")
    if (
        regex is None
        or (bound := regex_cost(regex)) is RegexCost.LINEAR
        or (short_runs and bound is RegexCost.SHORT_RUNS)
    ):
        return None
    return f"the regular expression {regex!r:.80} may try again and again"


def _model(component: Any) -> str | None:
    longest = component.get("max_input_chars_per_word", 0)
    if longest > MAX_WORD:
        return f"words of {longest} characters are looked at"
    pieces = component["vocab"] if isinstance(component["vocab"], list) else []
    if (longest := max((len(piece) for piece, _ in pieces), default=0)) > MAX_PIECE:
        return f"pieces of {longest} characters are looked for at each place"
    return None


def _post_processor(component: Any) -> str | None:
    for step in component_steps(component):
        if step["type"] != "TemplateProcessing":
            continue
        texts = sum("Sequence" in piece for piece in step["single"])
        added = sum(len(token["ids"]) for token in step["special_tokens"].values()) * len(step["single"])
        if texts > 1 or added > MAX_ADDED:
            return f"it takes the text {texts} times and adds {added} tokens"
    return None


def _longest(charsmap: str) -> int:
    """Return the length in characters of the longest text that sentencepiece's character table puts in a character's
    place.

    The table: size of a trie in bytes (uint32, little-endian), the trie, texts with a zero byte behind each.
    """
    try:
        table = base64.b64decode(charsmap, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    start = 4 + int.from_bytes(table[:4], "little")
    if start > len(table):
        raise ValueError("the table ends inside its trie")
    return max(1, *(len(text.decode("utf-8", "replace")) for text in table[start:].split(b"\0")))
