"""`repeat_penalty` and its window, as llama.cpp and Ollama have them: what of it can be had, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from motley.cluster.api.common.fields.repeat_penalty import read_repetition_penalty
from motley.replicas.errors import InvalidRequest

PATHS = {"/v1/completions": {"prompt": "abc"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]}}
TAKEN: list[tuple[dict[str, Any], float | None]] = [
    ({}, None),
    ({"repeat_penalty": 1.1, "repeat_last_n": -1}, 1.1),
    ({"repeat_penalty": 0.5, "repeat_last_n": -1, "penalize_nl": True, "penalize_newline": True}, 0.5),
    ({"repeat_penalty": 1.1, "repeat_last_n": 0}, 1.0),
    ({"repeat_last_n": 0}, 1.0),
    ({"repeat_last_n": 0, "repetition_penalty": 1.0}, 1.0),
    ({"repeat_penalty": 1}, 1),
    ({"repeat_penalty": 1.0, "repeat_last_n": 64, "frequency_penalty": 0.5}, 1.0),
    ({"repeat_penalty": 1.0, "repeat_last_n": 17}, 1.0),
    ({"repeat_last_n": -1}, None),
    ({"repeat_last_n": 64, "presence_penalty": 0.5}, None),
    ({"repeat_last_n": -1, "presence_penalty": 0}, None),
    ({"repeat_penalty": 1.3, "repetition_penalty": 1.3, "repeat_last_n": -1}, 1.3),
    ({"repetition_penalty": 1.3, "repeat_last_n": 64}, None),
    ({"penalize_nl": False, "penalize_newline": False}, None),
    ({"penalize_newline": False, "repeat_penalty": 1.0, "frequency_penalty": 0.0}, 1.0),
    ({"penalize_newline": False, "repeat_penalty": 1.5, "repeat_last_n": 0}, 1.0),
]
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"repeat_penalty": 1.1}, "repeat_penalty", "unsupported_parameter"),
    ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n", "unsupported_parameter"),
    ({"repeat_penalty": 1.1, "repeat_last_n": 17}, "repeat_last_n", "unsupported_parameter"),
    ({"repeat_last_n": 17}, "repeat_last_n", "unsupported_parameter"),
    ({"repeat_last_n": 17, "repetition_penalty": 1.1}, "repeat_last_n", "unsupported_parameter"),
    ({"repeat_last_n": 0, "repetition_penalty": 1.1}, "repeat_last_n", "invalid_value"),
    ({"repeat_last_n": 0, "frequency_penalty": 0.1}, "repeat_last_n", "unsupported_parameter"),
    ({"repeat_last_n": -1, "presence_penalty": 0.1}, "repeat_last_n", "unsupported_parameter"),
    ({"repeat_penalty": 1.0, "repeat_last_n": 17, "presence_penalty": 1}, "repeat_last_n", "unsupported_parameter"),
    ({"repeat_penalty": 1.1, "repetition_penalty": 1.2, "repeat_last_n": -1}, "repeat_penalty", "invalid_value"),
    ({"repeat_last_n": 2**31}, "repeat_last_n", "invalid_value"),
    ({"repeat_last_n": -2}, "repeat_last_n", "invalid_value"),
    ({"repeat_last_n": 1.5}, "repeat_last_n", "invalid_value"),
    ({"repeat_last_n": True}, "repeat_last_n", "invalid_value"),
    ({"repeat_penalty": "1.1"}, "repeat_penalty", "invalid_value"),
    ({"repeat_penalty": True, "repeat_last_n": -1}, "repeat_penalty", "invalid_value"),
    ({"repeat_penalty": 0, "repeat_last_n": -1}, "repeat_penalty", "invalid_value"),
    ({"repeat_penalty": 10.5, "repeat_last_n": -1}, "repeat_penalty", "invalid_value"),
    ({"repeat_penalty": 1.1, "repeat_last_n": -1, "penalize_nl": False}, "penalize_nl", "unsupported_parameter"),
    ({"frequency_penalty": 0.1, "penalize_newline": False}, "penalize_newline", "unsupported_parameter"),
    ({"repetition_penalty": 1.1, "penalize_newline": False}, "penalize_newline", "unsupported_parameter"),
    ({"penalize_newline": 0}, "penalize_newline", "invalid_value"),
    ({"options": {"penalize_newline": False, "presence_penalty": 1}}, "penalize_newline", "unsupported_parameter"),
    ({"options": {"repeat_penalty": 1.1}}, "repeat_penalty", "unsupported_parameter"),
]  # fmt: skip
SCALES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@pytest.mark.parametrize(("body", "penalty"), TAKEN, ids=str)
def test_what_can_be_had(body: dict[str, Any], penalty: float | None) -> None:
    sampling = {name: body[name] for name in SCALES if name in body}
    read_repetition_penalty(body, sampling)
    assert sampling.get("repetition_penalty") == (body.get("repetition_penalty") if penalty is None else penalty)


@pytest.mark.parametrize(("more", "param", "code"), REFUSED, ids=str)
async def test_what_cannot_be_had_is_refused_by_name(more: dict[str, Any], param: str, code: str, post: Any) -> None:
    for path, body in PATHS.items():
        error = (await post(path, {**body, **more})).json()["error"]
        assert (error["param"], error["code"]) == (param, code), error


async def test_the_whole_context_is_looked_at_as_repetition_penalty_does(
    post: Any, ingress: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    admit = ingress.admitter.admit
    monkeypatch.setattr(ingress.admitter, "admit", lambda ask, caller: seen.append(ask) or admit(ask, caller))
    wanted = {"repeat_penalty": 1.2, "repeat_last_n": -1}
    for path, body in PATHS.items():
        for more in (wanted, {"options": wanted}):
            assert (await post(path, {**body, **more, "max_tokens": 1})).status == 200
            assert seen[-1].sampling["repetition_penalty"] == 1.2
        for more, _ in TAKEN:
            assert (await post(path, {**body, **more, "max_tokens": 1})).status == 200, more


def test_a_number_of_another_kind_is_for_the_one_validator_to_refuse() -> None:
    sampling: dict[str, Any] = {}
    assert read_repetition_penalty({"repeat_penalty": [1]}, sampling) == {"repetition_penalty": "repeat_penalty"}
    assert sampling == {"repetition_penalty": [1]}
    with pytest.raises(InvalidRequest, match="give repeat_last_n: -1"):
        read_repetition_penalty({"repeat_penalty": 2}, {})
