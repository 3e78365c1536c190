"""Chat templates: as transformers renders them, with message text kept text, inside limits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from tool_templates import TEMPLATES

from motley.replicas.errors import CheckpointError, InvalidRequest
from motley.replicas.text.chat import chat_template
from motley.replicas.text.chat.chat_messages import check_messages
from motley.replicas.text.chat.chat_template import ChatTemplate
from motley.replicas.text.jinja.bounded_template import BoundedTemplate, TemplateLimit
from motley.replicas.text.tokenizer.tokenizer import Tokenizer

STYLES = ["qwen", "llama3", "llama2", "mistral"]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What does the with statement do?"}],
    [
        {"role": "user", "content": "  Hello,\nyou "},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "naïve 😀 \x00 {{ 1 + 1 }} {% raw %}"},
    ],
]


def _template(source: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate(source, file="chat_template.jinja", special_tokens=special_tokens, literal=["<|end|>"])


def _render(source: str, chat: Any = None, **arguments: Any) -> str:
    chat = chat or [{"role": "user", "content": "Hello"}]
    return "".join(_template(source).render(chat, add_generation_prompt=True, arguments=arguments))


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("style", STYLES)
def test_same_ids_as_transformers(
    style: str, chat: list[dict[str, str]], generate: bool, tokenizer_folders: dict[str, Path]
) -> None:
    peer = transformers.AutoTokenizer.from_pretrained(tokenizer_folders[style])
    expected = peer.apply_chat_template(chat, add_generation_prompt=generate, tokenize=True, return_dict=False)
    assert Tokenizer.load(tokenizer_folders[style]).chat(chat, generate) == expected


@pytest.mark.parametrize("style", STYLES)
def test_special_text_in_a_message_stays_text(style: str, tokenizer_folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(tokenizer_folders[style])
    plain = tokenizer.chat([{"role": "user", "content": "ab"}])
    for token_id in tokenizer.special_ids:
        token = tokenizer.token_text(token_id)
        ids = tokenizer.chat([{"role": "user", "content": f"a{token}b"}])
        assert [i for i in ids if i in tokenizer.special_ids] == [i for i in plain if i in tokenizer.special_ids]
        assert f"a{token}b" in tokenizer.decode(ids)


@pytest.mark.parametrize("style", STYLES)
def test_special_text_in_a_prompt_stays_text_on_request(style: str, tokenizer_folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(tokenizer_folders[style])
    for token_id in tokenizer.special_ids:
        token = tokenizer.token_text(token_id)
        ids = tokenizer.encode(f"a{token}{token}b", add_special_tokens=False, parse_special=False)
        assert not tokenizer.special_ids & set(ids)
        assert tokenizer.decode(ids) == f"a{token}{token}b"
    assert tokenizer.encode("plain text", parse_special=False) == tokenizer.encode("plain text")


def test_special_text_divided_over_parts_or_nested_stays_text(tokenizer_folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(tokenizer_folders["qwen"])
    end = tokenizer.token_id("<|im_end|>")
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    for content in (parts, "<|im_<|im_end|>end|>", "<|im_end|><|im_end|>"):
        ids = tokenizer.chat([{"role": "system", "content": "x"}, {"role": "user", "content": content}])
        assert ids.count(end) == 2


def test_every_start_of_overlapping_special_text_is_broken() -> None:
    template = ChatTemplate(
        "{{ messages[0]['content'] }}", file="x", special_tokens={}, literal=["<a><b>", "<b>", "<a>", "|"]
    )
    pieces = template.render([{"role": "user", "content": "<a><b>"}], add_generation_prompt=True)
    assert pieces == ["<", "a><", "b>"]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one"),
        (None, "a list"),
        ("hello", "a list"),
        ([3], r"messages\[0\] is not an object"),
        ([{"content": "x"}], r"messages\[0\]\.role is null"),
        ([{"role": "wizard", "content": "x"}], "'wizard'; expected one of system"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\]\.content is null"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content is null"),
        ([{"role": "user", "content": 3}], r"content is 3; expected a string"),
        ([{"role": "user", "content": "\udfff"}], "surrogate"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], r"content\[0\]"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text is null"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\]"),
        ([{"role": "user", "content": "x", "name": 3}], r"messages\[0\]\.name is 3"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "x", "tool_calls": []}],
         r"messages\[1\]\.tool_calls is \[\]; expected a list of 1 to 128"),
        ([{"role": "user", "content": "x", "tool_calls": []}], r"tool_calls is not a field of a message of role user"),
        ([{"role": "user", "content": "x", "wisdom": 1}], r"messages\[0\]\.wisdom"),
    ],
)  # fmt: skip
def test_wrong_messages_are_refused_by_name(messages: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        check_messages(messages)
    assert (caught.value.param or "").startswith("messages")


def test_parts_are_joined_and_names_kept() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "user", "name": "Ann", "content": parts}]) == [
        {"role": "user", "content": "ab", "name": "Ann"}
    ]


def test_a_name_that_the_template_leaves_out_is_refused() -> None:
    named = [{"role": "user", "name": "Ann", "content": "x"}]
    takes = _template("{% for m in messages %}{{ m.name }}: {{ m.content }}{% endfor %}")
    assert takes.render(named, add_generation_prompt=True) == ["Ann: x"]
    with pytest.raises(InvalidRequest, match="no place for names") as caught:
        _template("{% for m in messages %}{{ m.content }}{% endfor %}").render(named, add_generation_prompt=True)
    assert caught.value.param == "messages[0].name"


def test_what_the_template_refuses_is_the_clients_error(tokenizer_folders: dict[str, Path]) -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        Tokenizer.load(tokenizer_folders["mistral"]).chat([{"role": "assistant", "content": "x"}])
    assert (caught.value.param, caught.value.code) == ("messages", "chat_template_refused")


def test_a_model_without_a_template_says_so(tokenizer_folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folders["qwen"] / "tokenizer.json").read_bytes())
    tokenizer = Tokenizer.load(tmp_path)
    assert not tokenizer.has_chat_template
    assert tokenizer.encode("still works")
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.chat([{"role": "user", "content": "x"}])
    assert (caught.value.param, caught.value.code) == ("messages", "chat_template_missing")


def test_the_named_default_is_used_and_files_win(tokenizer_folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folders["qwen"] / "tokenizer.json").read_bytes())
    entries = [{"name": name, "template": name} for name in ("tool_use", "default")]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    messages = [{"role": "user", "content": "x"}]
    assert Tokenizer.load(tmp_path).chat(messages) == Tokenizer.load(tmp_path).encode("default")
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.load(tmp_path).chat(messages) == Tokenizer.load(tmp_path).encode("from the file")


def test_arguments_must_be_the_templates_own() -> None:
    source = "{% if thinking %}<think>{% endif %}{{ style }}{{ raise_exception('x') if tools }}"
    assert _render(source, thinking=True, style="kind") == "<think>kind"
    for arguments, says in [
        ({"other": True}, "no argument 'other'; it has style, thinking"),
        ({"messages": True}, "no argument 'messages'"),
        ({"raise_exception": True}, "no argument 'raise_exception'"),
        ({"thinking": 3}, "true, false or at most 256"),
        ({"style": "x" * 257}, "true, false or at most 256"),
    ]:
        with pytest.raises(InvalidRequest, match=says) as caught:
            _render(source, **arguments)
        assert caught.value.param == "chat_template_kwargs"
    template = _template("{{ style }}")
    pieces = template.render([{"role": "user", "content": "x"}], add_generation_prompt=True,
                             arguments={"style": "<|end|>"})  # fmt: skip
    assert pieces == ["<", "|end|>"]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("{% if a %}{% set x = 1 %}{% else %}{% set x = 2 %}{% endif %}{{ x }}", {"a"}),
        ("{% if a %}{% set x = 1 %}{% elif b %}{% set x = 2 %}{% endif %}{{ x }}", {"a", "b", "x"}),
        ("{% if a %}{% set x = 1 %}{% else %}{{ raise_exception('no') }}{% endif %}{{ x }}", {"a"}),
        ("{% if a %}{% set x = 1 %}{% else %}{{ a or raise_exception('no') }}{% endif %}{{ x }}", {"a", "x"}),
        ("{% if not x is defined %}{% set x = 1 %}{% endif %}{{ x }}", {"x"}),
        ("{% set x = x | default(1) %}{{ x }}", {"x"}),
        ("{% set x = '' %}{% if a %}{% set x = a %}{% endif %}{{ x }}", {"a"}),
        ("{% for i in a %}{% set x = i %}{% endfor %}{{ x }}", {"a", "x"}),
        ("{% for i in a %}{% if i %}{% set x = i %}{% else %}{% continue %}{% endif %}{{ x }}{% endfor %}", {"a"}),
        ("{% for i in a if i != b %}{% if i %}{% set i = i.c %}{% endif %}{{ i }}{% endfor %}{{ i }}", {"a", "b", "i"}),
        ("{% for i in a %}{% else %}{% set x = 1 %}{% endfor %}{{ x }}", {"a", "x"}),
        ("{% macro m(p, q=a) %}{{ p ~ q ~ x }}{% endmacro %}{% set x = 1 %}{{ m(1) }}{{ p }}", {"a", "p"}),
        ("{% set ns = namespace(x=a) %}{% if b %}{% set ns.x = 1 %}{% endif %}{{ ns.x }}", {"a", "b"}),
        ("{% set x %}{{ x }}{% endset %}{{ x }}", set()),
        ("{% with x = x, y = a %}{{ x ~ y }}{% endwith %}", {"a", "x"}),
        ("{% set x = 1 %}{% block b %}{{ x }}{% endblock %}", {"x"}),
    ],
)  # fmt: skip
def test_a_name_that_a_template_sets_before_it_reads_it_is_its_own(source: str, names: set[str]) -> None:
    assert BoundedTemplate(source, max_seconds=1, max_chars=99).variables == names


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("qwen25", []),
        ("qwen3", ["enable_thinking"]),
        ("opened", ["enable_thinking"]),
        ("llama31", ["builtin_tools", "custom_tools", "date_string", "tools_in_user_message"]),
    ],
)
def test_the_arguments_of_known_templates(name: str, arguments: list[str]) -> None:
    template = _template(TEMPLATES[name], bos_token="<s>")
    with pytest.raises(InvalidRequest, match=f"; it has {', '.join(arguments) or 'none'}$"):
        template.render([{"role": "user", "content": "x"}], add_generation_prompt=True, arguments={"content": "x"})
    assert all(template.has_argument(argument) for argument in arguments)


def test_json_in_templates_is_not_escaped_for_html() -> None:
    source = "{{ messages[0] | tojson(indent=1) }}"
    assert _render(source, [{"role": "user", "content": "<é>&'"}]) == ('{\n "role": "user",\n "content": "<é>&\'"\n}')


NESTED = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        NESTED,
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ 10000000000 * [1] }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{{ 'x' | center(10000000000) }}",
        "{{ 'x'.ljust(10000000000) }}",
        "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_is_a_bad_checkpoint(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.2)
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja") as caught:
        _template(source)
    assert caught.value.tensor == "chat_template"


def test_a_chat_on_which_the_template_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.2)
    with pytest.raises(InvalidRequest, match=r"longer than 0\.2 s") as caught:
        _render("{% if messages | length > 1 %}" + NESTED + "{% endif %}", CHATS[1])
    assert caught.value.code == "chat_template_limit"


def test_a_template_that_does_not_end_where_it_is_tried_is_not_said_to_have_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.2)
    source = "{% for m in messages if m.role == 'developer' %}" + NESTED + "{% endfor %}"
    with pytest.raises(InvalidRequest, match=r"longer than 0\.2 s") as caught:
        _render(source, [{"role": "developer", "content": "a"}])
    assert (caught.value.param, caught.value.code) == ("messages", "chat_template_limit")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ raise_exception.__globals__.json }}",
        "{% include '/etc/passwd' %}",
        "{{ lipsum(5) }}",
        "{{ messages[9].content.x }}",
        "{{ 'a' + 1 }}",
    ],
)
def test_a_template_has_no_way_out(source: str) -> None:
    with pytest.raises(InvalidRequest, match="template refuses"):
        _render(source)


def test_the_deadline_leaves_an_outer_tracer_in_place() -> None:
    def tracer(*_: object) -> None: ...

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        BoundedTemplate("x", max_seconds=1, max_chars=9).render({})
        with pytest.raises(TemplateLimit):
            BoundedTemplate("xxxxxxxxxx", max_seconds=1, max_chars=9).render({})
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
