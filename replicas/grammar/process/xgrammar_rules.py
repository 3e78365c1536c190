"""The grammar library's rules for a schema (xgrammar 0.2.9), with Motley's own where it allows what the schema does
not.

A schema's patterns are passed through the library as encoded names, and become Motley's rules in the library's result.
The library lets an escape within a string be any, also half of a surrogate pair, which is no text.
"""

from __future__ import annotations

import json
import re
from functools import partial
from importlib.metadata import version
from typing import Any

import xgrammar

from ..regex.text_rules import TextRule, json_text_rules, regex_grammar

_TEXT_RULE = re.compile(r'^(\S+) ::= Regex\("([A-Za-z0-9_-]*)", json_string=true\)$')
_RULE = re.compile(r"\S+ ::= \S")
_NEXT = re.compile(r"\n(?=\S+ ::= )")  # a rule that dispatches tags has several lines
_LITERAL = re.compile(r'\[(?:\\.|[^\]\\])*\]|"(?:\\.|[^"\\])*"')
_BRACKETS = re.compile(r"\([^()]*\)")
_NAME = re.compile(r"(?<= )[A-Za-z_][\w.-]*(?= )")
_HEX = "[0-9A-Fa-f]"
_ESCAPE = "basic_escape"
_CHARACTER = "[0-9A-CE-Fa-ce-f]"
_PAIR = f'[Dd] [89ABab] {_HEX} {_HEX} "\\\\u" [Dd] [C-Fc-f] {_HEX} {_HEX}'
_ESCAPE_RULE = (
    f'{_ESCAPE} ::= [\\"\\\\/bfnrt] | "u" ({_CHARACTER} {_HEX} {_HEX} {_HEX} | [Dd] [0-7] {_HEX} {_HEX} | {_PAIR})'
)


# The library writes \xe9 before an a for "éa", and then reads both as one character.
_BYTE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|.)")


# Texts that follow the schema of `check_library`, and texts that do not: each needs one of Motley's rules.
_MATCHING_TEXTS = ('{"a":"xx"}', '{"a" : "xx", "b":"\\ud83d\\ude00\\n","c":1}', '{"a":"xx","b":"é"}')
_REJECTED_TEXTS = (
    '{"a":"xxx"}', '{"a":"x"}', '{"a":"xx","b":"\\ud800"}', '{"a":"xx","b":"\\udc00\\ud83d"}', '{"a":"xx","a":1}',
    '{"a":"xx","\\u0061":1}', '{"a":"xx","b":"\\x"}', '{"a":"xx","b":"\n"}', '{"b":""}', '{"a":"xx","c":""}',
)  # fmt: skip


class UnknownLibraryRules(RuntimeError):
    """Error for an xgrammar whose rules are not in the known form."""

    def __init__(self, what: str) -> None:
        super().__init__(f"xgrammar {version('xgrammar')} writes its rules in an unknown form: {what[:200]}")


def exact_text_rules(grammar: Any) -> str:
    """Return the rules of an xgrammar.Grammar as text, with exact rules for texts. Raises ValueError where no text
    follows a pattern.
    """
    rules: list[str] = []
    within: dict[str, str] = {}
    printed = _NEXT.split(str(grammar).rstrip("\n"))
    _check_rules(printed)
    for rule in printed:
        found = _TEXT_RULE.match(rule)
        if found is not None:
            name, written = found[1], json_text_rules(TextRule.decoded(found[2]), found[1])
            [own] = [line for line in written if line.startswith(f"{name} ::= ")]
            if _is_sequence(body := own.removeprefix(f"{name} ::= ")):
                within[name] = body
                written.remove(own)
            rules += written
        elif rule.startswith(f"{_ESCAPE} ::="):
            rules.append(_ESCAPE_RULE)
        else:
            rules.append(_BYTE.sub(_of_fixed_length, rule))
    return "\n".join(_NAME.sub(lambda name: within.get(name[0], name[0]), rule) for rule in rules)


def _check_rules(rules: list[str]) -> None:
    """Raise UnknownLibraryRules unless each line is a rule, and those that are replaced are rules of their own."""
    named = {rule.partition(" ")[0] for rule in rules}
    if len(named) != len(rules):
        raise UnknownLibraryRules("two rules have the same name")
    for rule in rules:
        if not _RULE.match(rule):
            raise UnknownLibraryRules(rule)
        outside = _LITERAL.sub("", rule)  # quoted text and classes of characters say nothing of the form
        if "Regex" in outside and not _TEXT_RULE.match(rule):
            raise UnknownLibraryRules(rule)
        if _ESCAPE in outside and _ESCAPE not in named:
            raise UnknownLibraryRules(f"a rule refers to {_ESCAPE}, which no rule defines: {rule}")


def check_library() -> None:
    """Raise UnknownLibraryRules unless this xgrammar allows what it should for a schema that needs Motley's rules, and
    nothing else.

    Takes some 10 ms. A version that writes its rules in another form is refused here, before any client's schema is
    read.
    """
    text = {"type": "string"}
    schema = {
        "type": "object",
        "properties": {"a": {**text, "pattern": TextRule("^x{2}$").encoded()}, "b": text},
        "required": ["a"],
        "additionalProperties": {"type": "integer"},
        "propertyNames": {"pattern": TextRule(other_than=("a", "b")).encoded()},
    }
    rules = schema_rules(json.dumps(schema), max_whitespace=2)
    info = xgrammar.TokenizerInfo([bytes([value]) for value in range(256)], vocab_size=257, stop_token_ids=[256])
    try:
        compiled = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False).compile_grammar(rules)
    except (RuntimeError, ValueError, TypeError) as error:
        raise UnknownLibraryRules(f"with Motley's rules in place of some, it refuses its own: {error}") from None
    follows = partial(_follows, compiled)
    if wrong := [text for text in _MATCHING_TEXTS if not follows(text)] + [
        text for text in _REJECTED_TEXTS if follows(text)
    ]:
        verdict = "refused" if wrong[0] in _MATCHING_TEXTS else "accepted"
        raise UnknownLibraryRules(f"with Motley's rules, the text {wrong[0]} is {verdict}")


def _follows(compiled: Any, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(compiled)
    return bool(matcher.accept_string(text) and matcher.is_completed())


def _is_sequence(body: str) -> bool:
    """Return whether a rule's body may stand in place of its name: it has no alternatives outside brackets.

    There the library knows that a quote follows. For a rule that counts characters it would otherwise compute for each
    count and each token of the vocabulary whether the text may end within the token, which takes seconds.
    """
    body = _LITERAL.sub("", body)
    while (left := _BRACKETS.sub("", body)) != body:
        body = left
    return "|" not in body


def _of_fixed_length(escape: re.Match[str]) -> str:
    return escape[0] if escape[1] is None else f"\\u00{escape[1]}"


def schema_rules(schema: str, max_whitespace: int) -> str:
    return exact_text_rules(xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=max_whitespace))


def tag_rules(tag: dict[str, Any]) -> str:
    """Return the rules of a structural tag; its expressions are replaced by Motley's grammars first."""
    return exact_text_rules(xgrammar.Grammar.from_structural_tag(_without_regexes(tag)))


def _without_regexes(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_regexes(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "regex" and isinstance(value.get("pattern"), str):
        return {"type": "grammar", "grammar": regex_grammar(value["pattern"])}
    return {name: inner if name == "json_schema" else _without_regexes(inner) for name, inner in value.items()}
