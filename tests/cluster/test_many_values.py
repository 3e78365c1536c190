"""JSON of very many parts: refused by its punctuation, before it is read."""

from __future__ import annotations

import pytest

from motley.cluster.ask import Most
from motley.cluster.door import MIN_VALUES
from motley.cluster.errors import TooLarge
from motley.cluster.protocols import openai_fields
from motley.cluster.protocols.openai_fields import check_json_values, parse_object
from motley.replicas.errors import InvalidRequest

MOST = Most(values=100, members=50)
DEEP = 10  # lists within each list
TEXTS = {
    "values": "0" + ",0" * 101,
    "empty lists": ",".join(["[[]]"] * 26),
    "lists within lists": ",".join(["[" * DEEP + "]" * DEEP] * 6),
    "members with a space": ",".join(['{"a" :"","b" :"\\""}'] * 48),
    "objects within lists": ",".join(["[{}]"] * 26),
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_body_is_not_even_read(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    body = f'{{"a": [{text}]}}'
    assert list(parse_object(body.encode()))
    monkeypatch.setattr(openai_fields, "parse_strict_json", None)
    with pytest.raises(TooLarge) as caught:
        parse_object(body.encode(), MOST)
    assert caught.value.code == "too_many_values"


def test_as_many_as_that_are_read() -> None:
    body = f'{{"a": [{",".join(["[]"] * 48)}]}}'
    assert parse_object(body.encode(), MOST) == {"a": [[]] * 48}


@pytest.mark.parametrize("text", ["," * (MIN_VALUES + 1), "[" * (MIN_VALUES + 1), "[{" * (MIN_VALUES // 2 + 1)])
def test_nor_is_json_within_a_message(text: str) -> None:
    check_json_values("tools", text[:-2])
    with pytest.raises(InvalidRequest) as caught:
        check_json_values("tools", text[:9], text[9:])
    assert (caught.value.param, caught.value.code) == ("tools", "too_many_values")
