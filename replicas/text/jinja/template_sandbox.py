"""Jinja's sandbox with what chat templates use, as transformers has it, and without what has no use there.

It keeps a template from touching Python. A template that loops, or makes values of many gigabytes, is ended with its
process (template_process.py). Nothing is computed while compiling, where no limit would hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from types import BuiltinMethodType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.exceptions
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.tests

from .template_meter import TemplateLimit, check_arguments, check_made

MAX_DATE_FORMAT = 256
MAX_FORMAT = 1_000_000  # most characters of a text that % fills in
FILTERS = (
    "abs", "attr", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "e", "escape",
    "filesizeformat", "first", "float", "format", "groupby", "indent", "int", "items", "join", "last", "length",
    "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "safe", "select",
    "selectattr", "slice", "sort", "string", "sum", "title", "tojson", "trim", "truncate", "unique", "upper",
    "wordcount",
)  # fmt: skip
NUMERIC_TESTS = ("divisibleby", "even", "odd")  # with a text, % would format it
METHODS: dict[type, tuple[str, ...]] = {
    str: (
        "capitalize", "casefold", "center", "count", "endswith", "expandtabs", "find", "index", "isalnum", "isalpha",
        "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle",
        "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind",
        "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase",
        "title", "upper", "zfill",
    ),
    list: ("copy", "count", "index"),
    tuple: ("count", "index"),
    dict: ("copy", "get", "items", "keys", "values"),
}  # fmt: skip


class TemplateRefusal(jinja2.TemplateRuntimeError):
    """Error for a template that called `raise_exception`."""


def render_text(template: jinja2.Template, values: Mapping[str, Any], max_chars: int) -> str:
    """Return the rendered text. Raises TemplateLimit, TemplateRefusal or whatever error the template ran into."""
    parts, total = [], 0
    try:
        for part in template.generate(**values):
            total += len(part)
            if total > max_chars:
                raise TemplateLimit(f"the text is longer than {max_chars} characters")
            parts.append(part)
        return "".join(parts)
    except MemoryError as error:
        raise TemplateLimit("it needs more memory than a template may use") from error


class _GenerationTag(jinja2.ext.Extension):
    """Jinja extension for `{% generation %}…{% endgeneration %}`, which marks assistant text for training. Only the
    body of the block is rendered.
    """

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedCodeGenerator(jinja2.compiler.CodeGenerator):
    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: jinja2.compiler.Frame) -> None:
        made = node.ctx == "load"
        self.write("environment.check_made(" if made else "")
        super().visit_Tuple(node, frame)
        self.write(")" if made else "")

    def visit_ScopedEvalContextModifier(
        self, node: jinja2.nodes.ScopedEvalContextModifier, frame: jinja2.compiler.Frame
    ) -> None:
        self.fail("autoescape has no place in a chat template", node.lineno)


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Environment of chat templates."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    code_generator_class = _BoundedCodeGenerator
    check_made = staticmethod(check_made)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationTag],
            optimized=False,
            cache_size=0,
            finalize=_not_constant,
        )
        own = {"items": _items, "last": _last, "reverse": _reverse, "tojson": _json}
        self.filters = {name: _checked(own.get(name, jinja2.filters.FILTERS[name])) for name in FILTERS}
        self.tests = {**jinja2.tests.TESTS, **{name: _numeric(name) for name in NUMERIC_TESTS}}
        self.globals = {name: self.globals[name] for name in ("range", "dict", "namespace", "cycler", "joiner")}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise TemplateLimit("operator ** is not allowed in a chat template")
        if operator == "%" and isinstance(left, str) and len(left) > MAX_FORMAT:
            raise TemplateLimit(f"a format is longer than {MAX_FORMAT} characters")
        return check_made(super().call_binop(context, operator, left, right))

    def call(self, context: jinja2.runtime.Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check_method(function)
        check_arguments(args, kwargs)
        return check_made(super().call(context, function, *args, **kwargs))


@jinja2.pass_context
def _not_constant(context: jinja2.runtime.Context, value: Any) -> Any:
    """Return the value that `{{ … }}` writes. It takes the context so that Jinja computes no constant while
    compiling.
    """
    return value


def _check_method(function: Any) -> None:
    """Raise jinja2.sandbox.SecurityError for a method of a built-in type that chat templates have no use for."""
    if isinstance(function, MethodDescriptorType | WrapperDescriptorType):
        raise jinja2.exceptions.SecurityError("a method without its object is not called")
    name = getattr(function, "__name__", "")
    if name == "format_map" or isinstance(function, BuiltinMethodType):
        owner = getattr(function, "__self__", "")
        if not any(isinstance(owner, kind) and name in names for kind, names in METHODS.items()):
            raise jinja2.exceptions.SecurityError(f"{type(owner).__name__}.{name} is not allowed in a chat template")


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(*args: Any, **kwargs: Any) -> Any:
        check_arguments(args, kwargs)
        return check_made(function(*args, **kwargs))

    # Jinja marks filters that want its context or environment with an attribute.
    bounded.__dict__.update(getattr(function, "__dict__", {}))
    return bounded


def _numeric(name: str) -> Callable[..., Any]:
    function: Any = jinja2.tests.TESTS[name]

    def bounded(*args: Any) -> Any:
        if not all(isinstance(value, int | float) for value in args):
            raise TypeError(f"{name}: expected numbers")
        return function(*args)

    return bounded


def _items(value: Any) -> list[Any]:
    return list(jinja2.filters.do_items(value))


@jinja2.pass_environment
def _last(environment: jinja2.Environment, value: Any) -> Any:
    return jinja2.filters.do_last(environment, list(value))


def _reverse(value: Any) -> Any:
    return value[::-1] if isinstance(value, str) else list(value)[::-1]


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return the value as JSON, as transformers writes it: Jinja's own filter escapes HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > MAX_DATE_FORMAT:
        raise TemplateLimit(f"a format of a date is longer than {MAX_DATE_FORMAT} characters")
    return datetime.now().strftime(form)
