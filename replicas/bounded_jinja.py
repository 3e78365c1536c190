"""A Jinja sandbox for templates that come with a checkpoint: no side effects, bounded time and size.

Jinja's own sandbox keeps a template from touching Python, but not from looping for a day or doubling a string
forty times. Time is bounded by a line tracer on the rendering thread: a template compiles to Python, so every
round of every loop passes it, and nothing else can stop a thread from inside. Size is bounded where values are
made: operators, `~`, filters and calls.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from types import FrameType
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

__all__ = ["BoundedTemplate", "TemplateLimit", "TemplateRefusal"]

FILENAME = "<chat template>"
MAX_VALUE = 16_000_000  # characters or items of any one value


class TemplateLimit(jinja2.TemplateRuntimeError):
    """The template took too long or made too much."""


class TemplateRefusal(jinja2.TemplateRuntimeError):
    """The template called `raise_exception`."""


class BoundedTemplate:
    """A compiled template; `variables` are the names it expects to be given.

    Raises jinja2.TemplateSyntaxError, or RecursionError for absurd nesting.
    """

    def __init__(self, source: str, *, max_seconds: float, max_chars: int) -> None:
        environment = _Environment()
        self._template = environment.compile_template(source)
        names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        self.variables = frozenset(names - environment.globals.keys())
        self._max_seconds = max_seconds
        self._max_chars = max_chars

    def render(self, values: Mapping[str, Any]) -> str:
        """The rendered text. Raises TemplateLimit, TemplateRefusal or whatever the template ran into."""
        with _Deadline(self._max_seconds):
            parts, total = [], 0
            for part in self._template.generate(**values):
                total += len(part)
                if total > self._max_chars:
                    raise TemplateLimit(f"the text is longer than {self._max_chars} characters")
                parts.append(part)
            return "".join(parts)


class _Deadline:
    """While open, every line of template code that runs on this thread after the deadline raises.

    Seconds of this thread's own CPU time: a template never waits, and a busy machine is not its fault.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends = time.thread_time() + seconds
        self._before: Any = None

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._on_call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _on_call(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        return self._on_line if frame.f_code.co_filename == FILENAME else None

    def _on_line(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        if time.thread_time() > self._ends:
            raise TemplateLimit(f"rendering took longer than {self._seconds:g} s")
        return self._on_line


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])
    code_generator_class = _CodeGenerator

    def __init__(self) -> None:
        # optimized=False: constants are not folded while compiling, where no limit would hold.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _Generation],
            optimized=False,
            cache_size=0,
        )
        self.filters = {name: _bounded_filter(function) for name, function in self.filters.items()}
        self.filters["tojson"] = _tojson
        self.globals = {name: self.globals[name] for name in ("range", "dict", "namespace", "cycler", "joiner")}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def compile_template(self, source: str) -> jinja2.Template:
        code = self.compile(source, filename=FILENAME)
        return self.template_class.from_code(self, code, self.make_globals(None))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "*" and not _small_product(left, right)):
            raise TemplateLimit(f"operator {operator} with these operands is not allowed in a chat template")
        return _bounded(super().call_binop(context, operator, left, right))

    def call(self, context: jinja2.runtime.Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _bounded_arguments(args, kwargs)
        return _bounded(super().call(context, function, *args, **kwargs))

    def concatenate(self, parts: tuple[Any, ...]) -> str:
        return str(_bounded("".join(map(str, parts))))


def _bounded(value: Any) -> Any:
    if isinstance(value, str | list | tuple | dict) and len(value) > MAX_VALUE:
        raise TemplateLimit(f"a value is longer than {MAX_VALUE}")
    return value


def _bounded_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    # A width or a count is how one call makes a huge value.
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_VALUE:
            raise TemplateLimit(f"argument {value} is above {MAX_VALUE}")


def _small_product(left: Any, right: Any) -> bool:
    if isinstance(left, int | float) and isinstance(right, int | float):
        return abs(left) < 2**64 and abs(right) < 2**64
    count, value = (left, right) if isinstance(left, int) else (right, left)
    return isinstance(count, int) and isinstance(value, str | list | tuple) and count * len(value) <= MAX_VALUE


def _bounded_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _bounded_arguments(args, kwargs)
        return _bounded(function(*args, **kwargs))

    # Jinja marks filters that want its context or environment with an attribute.
    bounded.__dict__.update(getattr(function, "__dict__", {}))
    return bounded


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: Jinja's own escapes HTML, which a prompt is not."""
    _bounded_arguments((indent,), {})
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
