"""Limits of a hostile chat template: it takes neither memory nor time before anyone notices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.replicas.errors import CheckpointError, InvalidRequest
from motley.replicas.text.chat import chat_template
from motley.replicas.text.chat.chat_template import ChatTemplate
from motley.replicas.text.jinja import template_meter
from motley.replicas.text.jinja.bounded_template import BoundedTemplate, TemplateLimit

DAG = "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
MAPPING = (
    "{% set ns = namespace(x={'a': 1}) %}{% for i in range(60) %}{% set ns.x = {'b': ns.x, 'c': ns.x} %}{% endfor %}"
)
TUPLES = (  # small, and different ones of the same shape, until they are compared or hashed
    "{% set ns = namespace(a=('x',), b=('x',)) %}"
    "{% macro a() %}{% set ns.a = varargs %}{% endmacro %}{% macro b() %}{% set ns.b = varargs %}{% endmacro %}"
    "{% for i in range(60) %}{{ a(ns.a, ns.a) }}{{ b(ns.b, ns.b) }}{% endfor %}"
)
CYCLERS = TUPLES + "{% set both = [cycler(ns.a), cycler(ns.b)] %}"
BIG = "{% set big = 'ab' * 4000000 %}"
BEHIND = BIG + "{% set a = 'a' * 8000000 %}{% set b = 'ab' + 'a' * 4000000 %}{% set c = 'b' * 8000000 + 'a' %}"
KEEP = "{% set ns = namespace(l=[]) %}{% set big = [1] * 200000 %}"
MANY = "{% set many = (['ab'] * 200000) %}"
HOSTILE = [
    # operators
    "{{ 'a' * 1000000000000 }}",
    "{{ [[1] * 200000] * 200000 * 9 }}",
    "{{ '%2500000000d' % 1 }}",
    "{{ '%099999999999d' % 1 }}",
    "{{ '%*d' % (2000000000, 1) }}",
    "{{ '%.2000000000f' % 1 }}",
    "{{ '%(a(b))2000000000d' % {'a(b)': 1} }}",
    BIG + "{{ ('%(a)s' * 5000) % {'a': big} }}",
    "{% set ns = namespace(x=1) %}{% for i in range(99999) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x=(1,)) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=1) %}{% for i in range(99) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}",
    # methods
    "{{ ('a' * 20000).replace('a', 'a' * 150000) | length }}",
    "{{ ('a' * 4000000).join('b' * 4000000) | length }}",
    "{{ 'a'.center(2000000000) }}",
    "{{ 'a'.zfill(16000001) }}",
    "{{ ('\\t' * 9000000).expandtabs(16000000) | length }}",
    "{{ ('a ' * 8000000).split() | length }}",
    "{{ ('a ' * 8000000).rsplit(' ') | length }}",
    "{{ ('a\\n' * 8000000).splitlines() | length }}",
    "{{ '{:>2000000000}'.format(1) }}",
    "{{ '{0:{1}}'.format(1, 2000000000) }}",
    BIG + "{{ ('{0}' * 5000).format(big) }}",
    "{% set f = '{:>2000000000}'.format %}{{ f(1) }}",
    # filters
    "{{ 'a' | center(2000000000) }}",
    "{{ ('a' * 20000) | replace('a', 'a' * 150000) | length }}",
    BIG + "{{ range(9999) | join(big) | length }}",
    BIG + "{{ '%s%s%s%s%s%s%s%s%s' | format(big, big, big, big, big, big, big, big, big) }}",
    "{{ '%2000000000d' | format(1) }}",
    "{{ ('a\\n' * 4000000) | indent(1000) | length }}",
    "{{ ('a\\n' * 4000000) | indent('a' * 1000) | length }}",
    "{{ ('ab' * 8000000) | list | length }}",
    "{{ ('ab' * 8000000) | sort | length }}",
    "{{ ('ab' * 8000000) | map('upper') | list | length }}",
    "{{ ([[1] * 200000] * 100000) | sum(start=[]) | length }}",
    MANY + "{{ [many, many, many] | sum(start=[]) | length }}",
    MANY + "{{ [many, many, many] | tojson(indent=16000000) | length }}",
    "{{ 1.5 | round(16000000, 'ceil') }}",
    "{{ ('f' * 8000000) | int(0, 16) }}",
    MANY + "{{ ([many] * 200000) | map('join') | list | length }}",
    MANY + "{{ ([many] * 200000) | select('eq', many ~ '') | list | length }}",
    # what is small until it is written out or compared
    DAG + "{{ ns.x }}",
    DAG + "{{ ns }}",
    DAG + "{{ ns.x ~ '' }}",
    DAG + "{{ ns.x | string | length }}",
    DAG + "{{ ns.x | tojson | length }}",
    DAG + "{{ [ns.x] | join | length }}",
    DAG + "{{ '%s' % ns.x }}",
    DAG + "{{ '{}'.format(ns.x) }}",
    DAG + "{% set a = ns.x %}" + DAG + "{{ a == ns.x }}",
    DAG + "{% set a = ns.x %}" + DAG + "{{ a is eq(ns.x) }}",
    DAG + "{% set a = ns.x %}" + DAG + "{{ a in [ns.x] }}",
    DAG + "{% set a = ns.x %}" + DAG + "{{ [a].index(ns.x) }}",
    DAG + "{% set a = ns.x %}" + DAG + "{{ [a, ns.x] | sort | length }}",
    MAPPING + "{% set a = ns.x %}" + MAPPING + "{{ a == ns.x }}",
    # blocks of text, and much that is each within the limit
    BIG + "{% set all %}{% for i in range(9999) %}{{ big }}{% endfor %}{% endset %}{{ all | length }}",
    BIG + "{% macro m() %}{% for i in range(9999) %}{{ big }}{% endfor %}{% endmacro %}{{ m() | length }}",
    BIG + "{% filter upper %}{% for i in range(9999) %}{{ big }}{% endfor %}{% endfilter %}",
    BIG + "{% set ns = namespace(x=[]) %}{% for i in range(999) %}{% set ns.x = ns.x + [big ~ i] %}{% endfor %}",
    BIG + "{% set ns = namespace(x=[]) %}{% for i in range(999) %}{% set ns.x = ns.x + [big[i:]] %}{% endfor %}",
    BIG + "{% set ns = namespace(x=[]) %}{% for i in range(999) %}{% set ns.x = ns.x + [big.upper()] %}{% endfor %}",
    BIG + "{% set ns = namespace(x=[]) %}{% for i in range(999) %}{% set ns.x = ns.x + [big | title] %}{% endfor %}",
]
# What takes time, in one call that nothing can stop.
COMPARED = [
    DAG + "{{ ns.x is lower }}",
    DAG + "{{ ns.x is upper }}",
    DAG + "{% set a = ns.x %}" + DAG + "{% for i in [a, ns.x] %}{{ loop.changed(i) }}{% endfor %}",
    DAG + "{% set a = {1: ns.x} %}" + DAG + "{{ a.items() == {1: ns.x}.items() }}",
    TUPLES + "{{ ns.a is filter }}",
    TUPLES + "{{ {ns.a: 1} | length }}",
    TUPLES + "{{ {}[ns.a] }}",
    TUPLES + "{{ {}.get(ns.a) }}",
    TUPLES + "{{ dict([[ns.a, 1]]) | length }}",
    TUPLES + "{{ ({1: ns.a}.items() - {}.items()) | length }}",
    TUPLES + "{{ ({1: 1}.keys() - [ns.a]) | length }}",
    CYCLERS + "{{ both | sort(attribute='items') | length }}",
    CYCLERS + "{{ both | max(attribute='items') }}",
    CYCLERS + "{{ both | unique(attribute='items') | list | length }}",
    CYCLERS + "{{ both | groupby('items') | length }}",
    CYCLERS + "{{ both | selectattr('items', 'eq', (ns.b,)) | list | length }}",
    CYCLERS + "{{ '{0.items}'.format(both[0]) }}",
    "{% set ns = namespace(t=('x',)) %}{% for i in range(1000) %}{% set ns.t = {'a': ns.t}.items() | first %}"
    "{% endfor %}{{ {ns.t: 1} | length }}",
    # what the library does in time of the product of two lengths
    BEHIND + "{{ a.rfind(b) }}",
    BEHIND + "{{ a.rindex(b) }}",
    BEHIND + "{{ a.rsplit(b) | length }}",
    BEHIND + "{{ a.rpartition(b) | length }}",
    BEHIND + "{{ a.strip(c) | length }}",
    BEHIND + "{{ a.lstrip(c) | length }}",
    BEHIND + "{{ a.rstrip(c) | length }}",
    BEHIND + "{{ a | trim(c) | length }}",
    BEHIND + "{% macro m() %}{{ a.startswith(varargs) }}{% endmacro %}{{ m(*([a[1:] ~ 'b'] * 200000)) }}",
]
# What takes memory, with lists that nobody counts.
ROWS = [
    "{{ ('a ' * 8000000) | title | length }}",
    "{{ ('a ' * 8000000) | wordcount }}",
    "{{ ('1 ' * 8000000) % () }}",
    KEEP + "{{ [1] | batch(16000000, 0) | list | length }}",
    KEEP + "{% for i in range(9999) %}{% set ns.l = ns.l + (big | batch(200000) | list) %}{% endfor %}",
    KEEP + "{% for i in range(9999) %}{% set ns.l = ns.l + [cycler(*big)] %}{% endfor %}",
    KEEP + "{% set d = dict(range(99998) | batch(2) | list) %}{% for i in range(9999) %}"
    "{% set ns.l = ns.l + [namespace(d)] %}{% endfor %}",
    KEEP + "{% set d = dict(range(99998) | batch(2) | list) %}{% for i in range(9999) %}"
    "{% set ns.l = ns.l + [d | items] %}{% endfor %}",
]
COMPILING = [
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% if 1 %}" * 200 + "{% endif %}" * 200,
    "{% for i in [1] %}" * 50 + "{% endfor %}" * 50,
    "{{ " + "9" * 10000 + " }}",
    "x" * 2_000_000,
    "{% autoescape true %}{{ 1 }}{% endautoescape %}",
    "{{ 'a' | pprint }}",
]
ESCAPES = [
    "{{ 'a'.encode() }}",
    "{{ 'a'.translate({97: 'b'}) }}",
    "{{ '{a}'.format_map({'a': 1}) }}",
    "{{ (1).to_bytes(10, 'big') }}",
    "{{ dict.fromkeys([1]) }}",
    "{{ dict.get({'a': 1}, 'a') }}",
    "{{ '%2000000000d' is odd }}",
    "{{ '%2000000000d' is even }}",
    "{{ '%2000000000d' is divisibleby(5) }}",
    "{{ 1 | select('odd') | list }}",
]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, file="chat_template.jinja", special_tokens={}, literal=[])


def render(source: str, **values: Any) -> str:
    return BoundedTemplate(source, max_seconds=2, max_chars=1000).render(values)


@pytest.mark.parametrize("source", [*HOSTILE, *COMPARED], ids=range(len(HOSTILE) + len(COMPARED)))
def test_a_template_that_takes_too_much_is_a_bad_checkpoint(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.05)
    with pytest.raises(
        CheckpointError, match=r"chat_template: exceeds a limit on a chat of one short message"
    ) as caught:
        template(source)
    assert caught.value.file == "chat_template.jinja"


@pytest.mark.parametrize("source", COMPILING, ids=range(len(COMPILING)))
def test_a_template_that_does_not_compile_is_a_bad_checkpoint(source: str) -> None:
    with pytest.raises(CheckpointError, match="not a valid chat template"):
        template(source)


@pytest.mark.parametrize("source", ESCAPES)
def test_other_methods_are_not_called(source: str) -> None:
    with pytest.raises(InvalidRequest, match="refuses them"):
        template(source).render([{"role": "user", "content": "x"}], add_generation_prompt=True)


def test_memory_is_never_taken(tmp_path: Path) -> None:
    """In a process of its own: all of them together, and its peak."""
    script = """
import json, resource, sys, time
from motley.replicas.text.jinja.bounded_template import BoundedTemplate
from motley.replicas.text.jinja.template_meter import TemplateLimit
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
refused, slowest = 0, 0.0
for source in json.load(open(sys.argv[1])):
    began = time.thread_time()
    try:
        BoundedTemplate(source, max_seconds=0.2, max_chars=16_000_000).render({"messages": []})
    except (TemplateLimit, RecursionError):
        refused += 1
    slowest = max(slowest, time.thread_time() - began)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([refused, slowest, (peak - before) / 1024]))
"""
    (tmp_path / "hostile.json").write_text(json.dumps([*HOSTILE, *ROWS]))
    command = [sys.executable, "-c", script, str(tmp_path / "hostile.json")]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    refused, slowest, megabytes = json.loads(found.stdout)
    assert refused == len(HOSTILE) + len(ROWS)
    assert slowest < 3.0  # CPU seconds: the limit, and what a single call may take beyond it
    assert megabytes < 400


def test_a_long_complaint_is_cut() -> None:
    with pytest.raises(InvalidRequest) as caught:
        template("{{ raise_exception('x' * 1000000) }}").render(
            [{"role": "user", "content": "x"}], add_generation_prompt=True
        )
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'a-b'.split('-') | join('+') }}", "a+b"),
        ("{{ '{0.__class__}'.format(1) }}{{ '{0.a}'.format({'a': 1}) }}", "1"),
        (
            "{{ ' a b '.split() }}{{ 'a,b,c'.rsplit(',', 1) }}{{ 'a\\nb'.splitlines() }}",
            "['a', 'b']['a,b', 'c']['a', 'b']",
        ),
        (
            "{{ 'abc'.replace('b', 'xx') }}{{ 'aaa'.replace('a', 'b', 2) }}{{ 'aaa' | replace('a', 'b', 1) }}",
            "axxcbbabaa",
        ),
        ("{{ '%s and %02d%%' % ('a', 7) }}{{ '%(x)s' % {'x': 1} }}{{ '%s-%s' | format(1, 'b') }}", "a and 07%11-b"),
        ("{{ '{} {a:>4} {!r}'.format('x', 'x', a=1) }}", "x    1 'x'"),
        ("{{ 'a\\nb' | indent(2) }}|{{ 'a' | center(5) }}|{{ 'a'.ljust(3, '.') }}", "a\n  b|  a  |a.."),
        ("{{ [1, 2, 3] | sum }}{{ [{'a': 1}, {'a': 2}] | sum('a') }}{{ 2.345 | round(2) }}", "632.35"),
        (
            "{{ [3, 1, 2] | sort | join(',') }}{{ ['b', 'a', 'b'] | unique | list }}{{ [1, 2] | max }}",
            "1,2,3['b', 'a']2",
        ),
        ("{{ [{'a': 1}, {'a': 2}] | map(attribute='a') | list }}{{ [1, 2] | reverse | list }}", "[1, 2][2, 1]"),
        ("{{ [{'a': 1}, {'b': 2}] | selectattr('a', 'defined') | list | length }}", "1"),
        ("{{ 'abc'[::-1] }}{{ [1, 2, 3][1:] }}{{ 'abc' | first }}{{ 'abc' | reverse }}", "cba[2, 3]acba"),
        ("{{ {'b': 1, 'a': 2} | dictsort }}{{ {'a': 1} | items | list }}", "[('a', 2), ('b', 1)][('a', 1)]"),
        ("{{ 1 < 2 <= 2 }}{{ 'a' in ['a'] }}{{ 'a' not in {'b': 1} }}{{ (1, 2) == (1, 2) }}", "TrueTrueTrueTrue"),
        ("{{ '<&>' | e }}{{ '<' | safe }}{{ 'x' | upper }}{{ ' x ' | trim }}{{ [1] | string }}", "&lt;&amp;&gt;<Xx[1]"),
        ("{% set a %}x{{ 1 }}{% endset %}{{ a }}{% macro m(b) %}[{{ b }}]{% endmacro %}{{ m(2) }}", "x1[2]"),
        ("{{ {'a': [1, 'é']} | tojson }}{{ [1] | tojson(separators=(',', ':')) }}", '{"a": [1, "é"]}[1]'),
        (
            "{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}{{ 5 % 3 }}{{ 2 * 3 }}{{ [0] * 2 }}",
            "x126[0, 0]",
        ),
        (
            "{% for m in [1, 2] %}{{ loop.index }}{{ loop.last }}{% if loop.first %}{% continue %}{% endif %}"
            "{% endfor %}",
            "1False2True",
        ),
        (
            "{{ [4, 3] | select('odd') | list }}{{ 9 is divisibleby 3 }}{{ 'a' is lower }}{{ 'join' is filter }}",
            "[3]TrueTrueTrue",
        ),
        (
            "{{ {'a': 1}.get('b', 2) }}{{ dict([['a', 1]], b=2) }}{{ dict({'c': 3}) }}{{ {(1, 2): 3}[(1, 2)] }}"
            "{{ 3 - 1 }}",
            "2{'a': 1, 'b': 2}{'c': 3}32",
        ),
        (
            "{% for i in [1, 1, 2] %}{{ loop.changed(i) }}{% endfor %}{{ [{'a': 2}, {'a': 1}] | sort(attribute='a') }}"
            "{{ [{'a': 2}, {'a': 1}] | max(attribute='a') }}{{ [{'a': 2}] | groupby('a') | map('last') | list }}",
            "TrueFalseTrue[{'a': 1}, {'a': 2}]{'a': 2}[[{'a': 2}]]",
        ),
        ("{{ [1, 2, 3] | batch(2, 0) | list }}{{ [1, 2, 3] | slice(2) | list }}", "[[1, 2], [3, 0]][[1, 2], [3]]"),
        (
            "{{ 'a.b.c'.rsplit('.', 1) }}{{ 'aXbX'.rfind('X') }}{{ 'xax'.strip('x') }}{{ ' a'.lstrip() }}"
            "{{ 'a-' | trim('-') }}",
            "['a.b', 'c']3aaa",
        ),
        ("{{ 'a b' | title }}{{ 'a b c' | wordcount }}{{ 'ab'.startswith(('b', 'a')) }}", "A B3True"),
        (
            "{{ [[1, 2], [3]] | map('join', '-') | join(' ') }}{{ undefined }}{{ [1, 2] | batch(1) | list }}",
            "1-2 3[[1], [2]]",
        ),
    ],
)
def test_what_templates_do_all_day_is_as_in_jinja(source: str, expected: str) -> None:
    import jinja2.sandbox

    assert render(source) == expected
    if "tojson" not in source and "continue" not in source and "| e " not in source:
        assert jinja2.sandbox.SandboxedEnvironment().from_string(source).render() == expected


def test_a_long_chat_is_within_the_limits() -> None:
    source = (
        "{% set ns = namespace(seen=[]) %}{% for m in messages %}{% set ns.seen = ns.seen + [m] %}"
        "{% if m.role == 'user' and loop.index0 <= messages | length - 1 %}{{ m.role ~ ': ' + m.content | trim }}"
        "{% endif %}"
        "{% if messages[loop.index0:] and 'x' in m %}!{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 40, "n": i} for i in range(1000)]
    bounded = BoundedTemplate(source, max_seconds=chat_template.MAX_SECONDS, max_chars=16_000_000)
    assert len(bounded.render({"messages": messages})) == 1000 * (6 + 199)


NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@settings(max_examples=200)
@given(value=NESTED)
def test_sizes_are_not_underestimated(value: Any) -> None:
    """But for the marks between, and characters that a repr escapes."""
    assert len(str(value)) <= 12 * template_meter.text_size(value) + 12 * (str(value).count(",") + 2)


def test_limits_hold_after_a_rendering_too(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded = BoundedTemplate("{{ 'a' * n }}", max_seconds=1, max_chars=100)
    for _ in range(3):
        with pytest.raises(TemplateLimit):
            bounded.render({"n": 10**12})
        assert bounded.render({"n": 3}) == "aaa"
