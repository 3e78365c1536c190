"""How a model writes calls and reasoning: told from its template, or by the operator."""

from __future__ import annotations

from pathlib import Path

import pytest
from service_checkpoint import CHAT_TEMPLATE
from tool_templates import TEMPLATES, write_tool_tokenizer

from motley.cluster.api.common.parsers.parser_selection import TOOL_PARSERS, choose_styles, reasoning_state
from motley.cluster.fleet.spec.serve_options import ServeOptions
from motley.cluster.service.startup.serve_command import check
from motley.cluster.service_errors import ConfigurationError
from motley.replicas.text.tokenizer.tokenizer import Tokenizer

QWEN3_CODER = "{% if tools %}<tool_call>\n<function={{ tools[0].function.name }}>{% endif %}"


@pytest.mark.parametrize(
    ("source", "tools", "reasoning"),
    [
        (TEMPLATES["qwen25"], "hermes", "none"),
        (TEMPLATES["qwen3"], "hermes", "qwen3"),
        (TEMPLATES["opened"], "hermes", "qwen3"),
        (TEMPLATES["llama31"], "llama3_json", "none"),
        (CHAT_TEMPLATE, "none", "none"),
        (QWEN3_CODER, "none", "none"),  # calls in a language of tags
        (None, "none", "none"),
    ],
)
def test_styles_are_told_from_the_template_with_a_reason(source: str | None, tools: str, reasoning: str) -> None:
    styles = choose_styles(source)
    assert (styles.tools.name, styles.reasoning.name) == (tools, reasoning)
    assert all("chat template" in choice.reason for choice in (styles.tools, styles.reasoning))


def test_calls_are_told_from_the_template_for_tools() -> None:
    styles = choose_styles(CHAT_TEMPLATE, with_tools=TEMPLATES["qwen3"])
    assert (styles.tools.name, styles.reasoning.name) == ("hermes", "qwen3")
    assert choose_styles(TEMPLATES["qwen3"], with_tools=CHAT_TEMPLATE).tools.name == "none"


def test_the_operator_decides_otherwise() -> None:
    for name in (*TOOL_PARSERS, "none"):
        assert choose_styles(TEMPLATES["qwen3"], tools=name).tools.name == name
        assert "--tool-parser" in choose_styles(TEMPLATES["qwen3"], tools=name).tools.reason
    assert not choose_styles(TEMPLATES["qwen3"], reasoning="none").thinks
    assert choose_styles(CHAT_TEMPLATE, reasoning="qwen3").thinks


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (ServeOptions(tool_parser="pythonic"), "--tool-parser"),
        (ServeOptions(reasoning_parser="yes"), "--reasoning-parser"),
    ],
)
def test_an_unknown_parser_is_refused_before_anything_starts(options: ServeOptions, flag: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{flag} .*: expected one of auto, none, ") as caught:
        check(options)
    assert caught.value.param == flag


@pytest.mark.parametrize(
    ("template", "arguments", "state"),
    [
        ("qwen25", {}, "free"),
        ("qwen3", {}, "free"),
        ("qwen3", {"enable_thinking": False}, "closed"),
        ("opened", {}, "opened"),
        ("opened", {"enable_thinking": False}, "closed"),
    ],
)
def test_where_the_prompt_leaves_the_model(
    template: str, arguments: dict[str, bool], state: str, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(write_tool_tokenizer(tmp_path, template))
    for content in ("Hello", "<think>", "</think>", "<think>\n"):
        ids = tokenizer.chat([{"role": "user", "content": content}], arguments=arguments)
        assert reasoning_state(tokenizer, ids) == state
