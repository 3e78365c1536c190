"""JSON of very many parts: refused by its punctuation, before it is read."""

from __future__ import annotations

import pytest

from motley.cluster.api.common.admission import MIN_VALUES
from motley.cluster.api.common.fields import json_body
from motley.cluster.api.common.fields.json_body import check_json_values, parse_body
from motley.cluster.api.common.parsed_request import BodyLimits
from motley.cluster.request_errors import BodyTooLarge
from motley.replicas.errors import InvalidRequest

MOST = BodyLimits(values=100, members=50)
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
    assert list(parse_body(body.encode()))
    monkeypatch.setattr(json_body, "parse_strict_json", None)
    with pytest.raises(BodyTooLarge) as caught:
        parse_body(body.encode(), MOST)
    assert caught.value.code == "too_many_values"


def test_as_many_as_that_are_read() -> None:
    body = f'{{"a": [{",".join(["[]"] * 48)}]}}'
    assert parse_body(body.encode(), MOST) == {"a": [[]] * 48}


@pytest.mark.parametrize("text", ["," * (MIN_VALUES + 1), "[" * (MIN_VALUES + 1), "[{" * (MIN_VALUES // 2 + 1)])
def test_nor_is_json_within_a_message(text: str) -> None:
    check_json_values("tools", text[:-2])
    with pytest.raises(InvalidRequest) as caught:
        check_json_values("tools", text[:9], text[9:])
    assert (caught.value.param, caught.value.code) == ("tools", "too_many_values")
