"""Calls of tools in a model's text: found however the text is cut, and never at the cost of the text."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from motley.cluster.api.common.parsers.answer_parser import AnswerParser, ParsedAnswer, ToolParser, parse_whole
from motley.cluster.api.common.parsers.hermes_tool_calls import HermesParser
from motley.cluster.api.common.parsers.json_repair import JsonRepairer
from motley.cluster.api.common.parsers.llama_tool_calls import LlamaParser
from motley.cluster.api.common.parsers.parser_events import ParserEvent, TextEvent, ToolCallPiece, ToolCallStart
from motley.cluster.api.common.parsers.tool_call_reader import JsonObjectEnd, read_tool_call

NAMES = ("f", "get_weather")
ToolClass = type[HermesParser] | type[LlamaParser]
PARSERS = [HermesParser, LlamaParser]


def call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def run(parser: ToolParser, pieces: list[str]) -> list[ParserEvent]:
    """Events with neighbours of a kind joined: what they say must not depend on the cuts."""
    events: list[ParserEvent] = []
    for event in [event for piece in pieces for event in parser.push(piece)] + parser.finish():
        last = events[-1] if events else None
        if isinstance(event, TextEvent) and isinstance(last, TextEvent):
            events[-1] = TextEvent(last.text + event.text)
        elif isinstance(event, ToolCallPiece) and isinstance(last, ToolCallPiece) and last.index == event.index:
            events[-1] = ToolCallPiece(event.index, last.text + event.text)
        else:
            events.append(event)
    return events


def told(parser: ToolParser, text: str) -> tuple[str, list[tuple[str, str]]]:
    answer = parse_whole(AnswerParser(tools=parser), text)
    return answer.text, [(call.name, call.arguments) for _, call in sorted(answer.calls.items())]


def fenced(body: str, word: str = "json") -> str:
    return f"```{word}\n{body}\n```"


ARGUMENTS = '{"place": "Zür\\"ich }", "n": [1, {"x": null}], "s": "</tool_call>"}'
FINE_HERMES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("Hello there.\n", "Hello there.\n", []),
    (hermes(call("f", ARGUMENTS)), "", [("f", ARGUMENTS)]),
    ("  " + hermes(call("f", "{}")) + "\n", "", [("f", "{}")]),
    ("I will look.\n\n" + hermes(call("f", "{}")), "I will look.", [("f", "{}")]),
    (hermes(call("f", "{}")) + "\n" + hermes(call("get_weather", "{}")), "", [("f", "{}"), ("get_weather", "{}")]),
    (hermes(call("f", "{}")) + "\nDone. ", "\nDone. ", [("f", "{}")]),
    (hermes('{"arguments": {"a":1}, "name": "f"}'), "", [("f", '{"a":1}')]),
    (hermes('{"id": 7, "name": "f", "arguments": {"a": 1} , "x": [2]}'), "", [("f", '{"a": 1}')]),
    (hermes('{"name": "f", "arguments": "{\\"a\\": 1}"}'), "", [("f", '{"a": 1}')]),
    (hermes('{"name": "f"}'), "", [("f", "{}")]),
    (hermes(call("f", "{}", key="parameters")), "", [("f", "{}")]),
    ("<tool_call>" + call("f", "{}"), "", [("f", "{}")]),  # the end came in place of the closing mark
    ("<tool_call>" + call("f", "{}") + " and more", " and more", [("f", "{}")]),
    ("<tool_<tool_call>" + call("f", "{}") + "</tool_call>", "<tool_", [("f", "{}")]),
    (hermes(call("f", "null")), "", [("f", "{}")]),
    (hermes(call("f", '""')), "", [("f", "{}")]),
    (hermes(call("f", '" "')), "", [("f", "{}")]),
    (hermes(call("f", '"{\\"a\\": \\"x\\\\ny\\"}"')), "", [("f", '{"a": "x\\ny"}')]),
    (hermes(call("f", '"{\\"a\\": \\"x\\ny\\",}"')), "", [("f", '{"a": "x\\ny"}')]),
    (hermes(call("f", "{}") + "}"), "", [("f", "{}")]),
    (hermes("[" + call("f", "{}") + "]"), "", [("f", "{}")]),
    (hermes("[ " + call("f", "{}") + ",\n" + call("get_weather", '{"a": 1}') + " ]") + "!", "!",
     [("f", "{}"), ("get_weather", '{"a": 1}')]),
    (hermes(call("f", "{}") + "\n" + call("f", '{"a": 1}')), "", [("f", "{}"), ("f", '{"a": 1}')]),
    (hermes("[" + call("f", "{}") + ", " + call("unknown", "{}") + "]"),
     ", " + call("unknown", "{}") + "]\n</tool_call>", [("f", "{}")]),
    (hermes("{'name': 'f', 'arguments': {'a': 'it\\'s', 'b': None}}"), "", [("f", '{"a": "it\'s", "b": null}')]),
    (hermes('{"arguments": {"a": NaN}, "name": "f"}'), "", [("f", '{"a": null}')]),
    (hermes(call("f", '{"a": "x')) + "\n" + hermes(call("f", "{}")), "",
     [("f", '{"a": "x}\\n"}'), ("f", "{}")]),  # a line end within a string: it was not closed
    (hermes(call("f", '{"a": 1')[:-1]) + " after", " after", [("f", '{"a": 1\n}')]),
    (hermes(call("f", "{}")[:-1]) + " after", " after", [("f", "{}")]),
    (hermes(fenced(call("f", ARGUMENTS))), "", [("f", ARGUMENTS)]),
    (hermes(fenced(call("f", "{}"), "")) + "!", "!", [("f", "{}")]),
    ("<tool_call>```json " + call("f", "{}") + "```</tool_call>", "", [("f", "{}")]),
    (hermes(fenced("[" + call("f", "{}") + ", " + call("f", '{"a": 1}') + "]")), "", [("f", "{}"), ("f", '{"a": 1}')]),
    (hermes(fenced(call("f", '{"a": "```\\n`x`"}'))), "", [("f", '{"a": "```\\n`x`"}')]),
    (hermes(fenced('{"arguments": {"a": "`"}, "name": "f"}')), "", [("f", '{"a": "`"}')]),
    (hermes(fenced(call("f", '{"a": "x"')[:-1])), "", [("f", '{"a": "x"\n}')]),
    (hermes(fenced(call("f", '{"a": "x')[:-1])), "", [("f", '{"a": "x\\n"}')]),
    (hermes(fenced(call("f", '{"a": 1')[:-1])), "", [("f", '{"a": 1\n}')]),
    (hermes(fenced(call("f", '{"a": `x`}'))), "", [("f", '{"a": "`x`"}')]),
    (hermes('{"function": ' + call("f", '{"a": 1}') + "}"), "", [("f", '{"a": 1}')]),
    (hermes('{"type": "function", "function": ' + call("f", '"{}"') + "}"), "", [("f", "{}")]),
    (hermes(fenced('[{"id": "1", "type": "function", "function": ' + call("f", "{}") + "}]")), "", [("f", "{}")]),
    (hermes('{"name": "f", "arguments": {}, "parameters": {}}'), "", [("f", "{}")]),
    (hermes('{"name": "f", "arguments": {}, "name": "unknown"}'), "", [("f", "{}")]),
]  # fmt: skip
BROKEN_HERMES = [
    "the <tool_call> mark",
    "<tool_call>",
    "<tool_call",
    "x </tool_call>",
    hermes("not json"),
    hermes(call("unknown", "{}")),
    hermes(call("f", "[1]")),
    hermes(call("f", '"text"')),
    hermes('{"name": 7, "arguments": {}}'),
    hermes('{"arguments": {}, "parameters": {}, "name": "f"}'),
    hermes("[" + call("unknown", "{}") + ", " + call("f", "{}") + "]"),
    hermes("[[" + call("f", "{}") + "]]"),
    hermes('["f", {}]'),
    hermes(fenced("print(1)", "python")),
    hermes(fenced(call("unknown", "{}"))),
    hermes(fenced(fenced(call("f", "{}")))),
    hermes("`" + call("f", "{}") + "`"),
    hermes('{"function": "f", "arguments": {}}'),
    hermes('{"function": ' + call("unknown", "{}") + "}"),
    hermes('{"name": null, "function": ' + call("f", "{}") + "}"),
    "<tool_call>```" + "x" * 20 + "\n" + call("f", "{}"),
    hermes("{" + '"a":' + "[" * 5000),
    "<tool_call>" + " " * 100 + call("f", "{}"),
]


@pytest.mark.parametrize(("text", "content", "calls"), FINE_HERMES)
def test_hermes_calls(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert told(parser := HermesParser(NAMES), text) == (content, calls)
    assert parser.num_calls == len(calls)


@pytest.mark.parametrize("text", BROKEN_HERMES)
def test_what_is_no_call_stays_text_to_the_letter(text: str) -> None:
    for whole in (text, f"Before. {text} after", f"{text}\n"):
        assert told(parser := HermesParser(NAMES), whole) == (whole, [])
        assert parser.num_calls == 0


FINE_LLAMA: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("Hello {there}.", "Hello {there}.", []),
    (call("f", ARGUMENTS, "parameters"), "", [("f", ARGUMENTS)]),
    ("\n<|python_tag|>" + call("f", "{}", "parameters"), "", [("f", "{}")]),
    (call("f", "{}") + "; " + call("get_weather", '{"a": 1}'), "", [("f", "{}"), ("get_weather", '{"a": 1}')]),
    ('{"type": "function", "name": "f", "parameters": {"a": 1}}\n', "", [("f", '{"a": 1}')]),
    (call("f", "{}") + " as asked", " as asked", [("f", "{}")]),
    (call("f", '{"a": NaN}') + "; " + call("f", "{}"), "", [("f", '{"a": null}'), ("f", "{}")]),
    ("[" + call("f", "{}") + ", " + call("f", '{"a": 1}') + "]\n", "", [("f", "{}"), ("f", '{"a": 1}')]),
    (call("f", "null") + "\n" + call("f", '""') + "}", "", [("f", "{}"), ("f", "{}")]),
    ('{"type": "function", "function": ' + call("f", '{"a": 1}', "parameters") + "}", "", [("f", '{"a": 1}')]),
    (call("f", "{}")[:-1] + "<b>", "<b>", [("f", "{}")]),
]
BROKEN_LLAMA = [
    "<|python_tag|>print(1)",
    "<|python_tag|>",
    "{",
    '{"answer": 42}',
    '{"name": "Bob", "parameters": {}}',
    '{"function": {"name": "Bob", "parameters": {}}}',
    "Sure: " + call("f", "{}"),
    "[",
    '[{"answer": 42}, 7]',
    "[1, 2]",
]


@pytest.mark.parametrize(("text", "content", "calls"), FINE_LLAMA)
def test_llama_calls(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert told(parser := LlamaParser(NAMES), text) == (content, calls)
    assert parser.num_calls == len(calls)


@pytest.mark.parametrize("text", BROKEN_LLAMA)
def test_other_json_is_the_answer(text: str) -> None:
    assert told(parser := LlamaParser(NAMES), text) == (text, [])
    assert parser.num_calls == 0


def test_arguments_are_handed_out_while_they_are_written() -> None:
    for parser, text in ((HermesParser(NAMES), hermes(call("f", ARGUMENTS))),
                         (LlamaParser(NAMES), call("f", ARGUMENTS, "parameters"))):  # fmt: skip
        pushed = [parser.push(char) for char in text]
        pieces = [event.text for events in pushed for event in events if isinstance(event, ToolCallPiece)]
        assert "".join(pieces) == ARGUMENTS
        assert (
            len(pieces) >= len(ARGUMENTS) - 17
        )  # numbers and words come once they are whole, closing quotes and commas with what follows
        assert sum(isinstance(event, ToolCallStart) for events in pushed for event in events) == 1


# As models write arguments -> what clients get, which is JSON.
MENDED = {
    '{"a": "x\ny\t"}': '{"a": "x\\ny\\t"}',
    '{"a": NaN, "b": -Infinity, "c": None}': '{"a": null, "b": null, "c": null}',
    '{"d": [True, False, undefined]}': '{"d": [true, false, null]}',
    '{"a": .5, "b": +1, "c": [-.25, 3., +2e3]}': '{"a": 0.5, "b": 1, "c": [-0.25, 3.0, 2e3]}',
    '{"zip": 01234, "range": 1-2, "dot": .}': '{"zip": "01234", "range": "1-2", "dot": "."}',
    '{"a": [1, 2, ], }': '{"a": [1, 2 ] }',
    '{"a": 1,, "b": 2}': '{"a": 1, "b": 2}',
    '{"a": 1 2}': '{"a": "1 2"}',
    '{"a": next Monday, b: 2}': '{"a": "next Monday", "b": 2}',
    "{'a': 'it\\'s \"q\"'}": '{"a": "it\'s \\"q\\""}',
    '{"a": [}': '{"a": []}',
    '{"a": {"b": [1}}': '{"a": {"b": [1]}}',
    '{"a": }': '{"a": null}',
    '{"a"}': '{"a": null}',
    '{"a": 1 "b": 2}': '{"a": 1 ,"b": 2}',
    '{"a": "x" "b": 2}': '{"a": "x" ,"b": 2}',
    r'{"a": "C:\d\u12"}': r'{"a": "C:\\d\\u12"}',
    '{"a": 01}': '{"a": "01"}',
    '{"cmd": "echo "hi" && rm x"}': '{"cmd": "echo \\"hi\\" && rm x"}',
    '{"sql": "SELECT * FROM "t" WHERE 1"}': '{"sql": "SELECT * FROM \\"t\\" WHERE 1"}',
    '{"url": http://e.com/a}': '{"url": "http://e.com/a"}',
    '{"url": http://e.com/a?b[0]=<c>;d, "at": 10:30}': '{"url": "http://e.com/a?b[0]=<c>;d", "at": "10:30"}',
    '{"place": "a" "b"}': '{"place": "a\\" \\"b"}',
    '{"a": "he said "hi""}': '{"a": "he said \\"hi\\""}',
    '{"a": "say "hi", then go", b: "x", }': '{"a": "say \\"hi\\", then go", "b": "x" }',
    '{"a": ["x "y": "z", or so", 12, "b" , true]}': '{"a": ["x \\"y\\": \\"z\\", or so", 12, "b" , true]}',
    '{"a": "x["y"] and"}': '{"a": "x[\\"y\\"] and"}',
    "{'a': 'it's 'q' \"r\"'}": '{"a": "it\'s \'q\' \\"r\\""}',
    '{"a"b": 1, "c" 2}': '{"a\\"b": 1, "c" : 2}',
    '{"a": soon, or so}': '{"a": "soon, or so"}',
    "{a: New\nYork\nb: 2}": '{"a": "New\\nYork"\n,"b": 2}',
    '{"a": [x\ny, z]}': '{"a": ["x"\n,"y", "z"]}',
    '{"a": "\x00"}': r'{"a": "\u0000"}',
}


@pytest.mark.parametrize("arguments", MENDED)
def test_arguments_are_json_however_they_are_written(arguments: str) -> None:
    expected = [
        ToolCallStart(0, "f"),
        ToolCallPiece(0, MENDED[arguments]),
        ToolCallStart(1, "f"),
        ToolCallPiece(1, "{}"),
    ]
    json.loads(MENDED[arguments])
    for parser, text in (
        (HermesParser(NAMES), hermes(call("f", arguments)) + "\n" + hermes(call("f", "{}"))),
        (LlamaParser(NAMES), call("f", arguments) + "; " + call("f", "{}")),
    ):
        assert run(parser, list(text)) == run(type(parser)(NAMES), [text])
        assert run(type(parser)(NAMES), [text]) == expected
        assert parser.num_calls == 2


QUOTED = st.text(st.sampled_from('""""\' \n,:{}[];<aé1'))


@given(value=QUOTED, more=st.sampled_from(["", ', "b": [1, "x"]', ",\n 'b': 2", ', b: "y"']))
@example(value='echo "hi" && rm x', more="")
def test_a_string_with_quotes_that_are_not_escaped_comes_whole(value: str, more: str) -> None:
    """Unless a quote in it has behind it what stands behind a string."""
    value = re.sub(r'"(?=[\s"]*[,}\]:])', "", value)
    text = f'{{"a": "{value}"{more}}}'
    for make, whole in ((HermesParser, hermes(call("f", text))), (LlamaParser, call("f", text))):
        answer = ParsedAnswer().add(expected := run(make(NAMES), [whole]))
        assert json.loads(answer.calls[0].arguments)["a"] == value
        assert ("b" in json.loads(answer.calls[0].arguments)) == bool(more)
        assert run(make(NAMES), list(whole)) == expected


@given(
    st.dictionaries(st.text(max_size=5), st.text() | st.lists(st.none() | st.integers() | st.text(max_size=5))),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_json_comes_through_to_the_letter(arguments: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(arguments, indent=indent, ensure_ascii=ascii_only)
    for pieces in ([text], list(text)):
        mender = JsonRepairer("</tool_call>")
        assert "".join(mender.push(piece)[0] for piece in pieces) == text
        assert mender.done


CUT: list[tuple[ToolClass, str, str, list[tuple[str, str]]]] = [
    (HermesParser, "<tool_call>\n" + call("f", '{"a": 1')[:-1], "", [("f", '{"a": 1')]),
    (HermesParser, "I look.\n<tool_call>" + call("f", '{"a": 1}')[:-1], "I look.", [("f", '{"a": 1}')]),
    (HermesParser, hermes(call("f", "{}")) + "\n<tool_call>" + call("f", "{")[:-1], "", [("f", "{}"), ("f", "{")]),
    (HermesParser, hermes(call("f", "{}")) + "\n<tool_call>" + '{"name', "", [("f", "{}")]),
    (HermesParser, hermes(call("f", "{}")) + "\n<tool_call>\n", "", [("f", "{}")]),
    (HermesParser, hermes(call("f", "{}")) + "\n<tool_", "", [("f", "{}")]),
    (HermesParser, hermes(call("f", "{}"))[:-3], "", [("f", "{}")]),
    (HermesParser, "<tool_call>\n" + '{"name": "f"', "<tool_call>\n" + '{"name": "f"', []),
    (HermesParser, "<tool_call>" + call("unknown", "{")[:-1], "<tool_call>" + call("unknown", "{")[:-1], []),
    (LlamaParser, "<|python_tag|>" + call("f", '{"a": 1')[:-1], "", [("f", '{"a": 1')]),
    (LlamaParser, call("f", "{}") + "; <|python_tag|>" + '{"na', "", [("f", "{}")]),
    (LlamaParser, call("f", "{}") + "; <|python", "", [("f", "{}")]),
    (LlamaParser, call("f", "{}") + "; " + call("f", "{")[:-1], "", [("f", "{}"), ("f", "{")]),
]


@pytest.mark.parametrize(("make", "text", "content", "calls"), CUT)
def test_a_text_that_ends_within_a_call_shows_no_mark_behind_it(
    make: ToolClass, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    """And streamed or whole, the answer is the same."""
    assert told(parser := make(NAMES), text) == (content, calls)
    assert run(make(NAMES), list(text)) == run(make(NAMES), [text])
    assert parser.num_calls == sum(arguments.endswith("}") for _, arguments in calls)
    assert told(make(NAMES, single=True), text) == (content, calls[:1])


CLOSES = '{"a": "</tool_call>"}'


@pytest.mark.parametrize(
    ("make", "whole"), [(HermesParser, hermes(call("f", CLOSES))), (LlamaParser, call("f", CLOSES))]
)
def test_a_required_call_that_is_cut_off_shows_no_mark(make: ToolClass, whole: str) -> None:
    """Wherever it is cut: what is known of the call, or nothing. Where none was required, the beginning is text."""
    for cut in range(1, len(whole)):
        content, calls = told(make(NAMES, required=True), whole[:cut])
        assert content == ""
        assert all(name == "f" and CLOSES.startswith(arguments) for name, arguments in calls)
        assert bool(calls) == ('"arguments": {' in whole[:cut])
        assert run(make(NAMES, required=True), list(whole[:cut])) == run(make(NAMES, required=True), [whole[:cut]])
        if "arguments" not in whole[:cut]:
            assert told(make(NAMES), whole[:cut]) == (whole[:cut], [])


def test_one_call_alone_where_calls_in_parallel_are_not_wanted() -> None:
    two = [call("f", '{"a": 1}'), call("get_weather", "{}")]
    single = HermesParser(NAMES, single=True)
    assert told(single, "\n".join(map(hermes, two))) == ("", [("f", '{"a": 1}')])
    assert told(LlamaParser(NAMES, single=True), "; ".join(two)) == ("", [("f", '{"a": 1}')])
    assert single.num_calls == 1


FRAGMENTS = st.sampled_from([
    *(text for text, _, _ in FINE_HERMES + FINE_LLAMA), *BROKEN_HERMES[:-2], *BROKEN_LLAMA,
    "<tool_call>", "</tool_call>", "<tool", "_call>", "<", "\n", "  ", "{", "}", '"', "\\", ";", "é😀",
    '{"name": "f", ', '"arguments": {', " " * 70, "```json\n", "```", "`",
]) | st.text(max_size=5)  # fmt: skip


@st.composite
def cut_texts(draw: Any) -> list[str]:
    text = "".join(draw(st.lists(FRAGMENTS, max_size=6)))
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=40)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        *((HermesParser, text) for text, _, _ in FINE_HERMES),
        *((LlamaParser, text) for text, _, _ in FINE_LLAMA),
        *((HermesParser, text) for text in BROKEN_HERMES[:-2]),
        *((LlamaParser, text) for text in BROKEN_LLAMA),
    ],
)
def test_no_cut_in_two_changes_anything(make: Any, text: str) -> None:
    whole = run(make(NAMES), [text])
    assert [cut for cut in range(len(text)) if run(make(NAMES), [text[:cut], text[cut:]]) != whole] == []


@pytest.mark.parametrize("make", PARSERS)
@given(pieces=cut_texts())
@example(pieces=list(hermes(call("f", ARGUMENTS))))
def test_cuts_change_nothing_and_nothing_is_lost(make: Any, pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = run(parser := make(NAMES), [text])
    assert run(make(NAMES), pieces) == whole
    assert run(make(NAMES), list(text)) == whole
    answer = ParsedAnswer().add(whole)
    assert parser.num_calls <= len(answer.calls) <= parser.num_calls + 1  # the last may be cut off
    for index in range(parser.num_calls):
        assert isinstance(json.loads(answer.calls[index].arguments), dict)
    first = ParsedAnswer().add(run(make(NAMES, single=True), pieces))
    assert first.calls == {index: call for index, call in answer.calls.items() if index == 0}
    if not answer.calls:
        assert answer.text == text
    for event in whole:
        assert event.text in text if isinstance(event, TextEvent) else True  # in the order and form it was written
    assert sum(len(event.text) for event in whole if isinstance(event, TextEvent)) <= len(text)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20),
       st.text(), st.sampled_from([None, 1]))  # fmt: skip
def test_the_end_of_an_object_is_found(value: Any, behind: str, indent: int | None) -> None:
    text = json.dumps({"value": value}, indent=indent, ensure_ascii=False)
    assert JsonObjectEnd().feed(text + behind) == len(text)


@given(
    st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.floats(allow_nan=False, allow_infinity=False)))
)
def test_arguments_are_those_that_were_written(arguments: dict[str, Any]) -> None:
    for raw in (json.dumps(arguments), json.dumps(arguments, indent=2, ensure_ascii=False)):
        found = read_tool_call(f'{{ "x": [] ,\n"arguments" : {raw} ,"name":"f"}}', NAMES)
        assert found is not None
        assert found.arguments == raw
