"""JSON of clients: a name given twice is told with its path."""

import pytest

from motley.replicas.errors import InvalidRequest
from motley.replicas.grammar.grammar_spec import GrammarSpec
from motley.replicas.strict_json import DuplicateName, parse_strict_json


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('{"a": 1, "a": 2}', "a"),
        ('{"a": {"5": 1, "5": 2}}', "a.5"),
        ('{"b": [{}, {"x": [{"y": 1, "y": 1}]}]}', "b[1].x[0].y"),
        ('[{"a": {"c": 1, "c": 1}, "a": 1}]', "[0].a"),  # the outermost
    ],
)
def test_a_name_given_twice_is_told(text, path):
    with pytest.raises(DuplicateName) as caught:
        parse_strict_json(text)
    assert caught.value.path == path


def test_other_values_are_as_json_has_them():
    assert parse_strict_json('{"a": [1, {"b": null}], "c": "x"}') == {"a": [1, {"b": None}], "c": "x"}
    with pytest.raises(ValueError, match="Expecting"):
        parse_strict_json("{")
    with pytest.raises(RecursionError):
        parse_strict_json("[" * 200_000)


def test_a_schema_with_a_name_twice_is_refused():
    with pytest.raises(InvalidRequest, match="type: given twice"):
        GrammarSpec.json_schema('{"type": "integer", "type": "string"}', field="structured_outputs.json")
