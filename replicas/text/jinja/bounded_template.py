"""Jinja sandbox for templates that come with a checkpoint: no side effects, bounded time and size.

Jinja's own sandbox keeps a template from touching Python, but not from looping for a day or doubling a string
forty times. Time is bounded by a line tracer on the rendering thread: a template compiles to Python, so every
round of every loop passes it, and nothing else can stop a thread from inside; loops inside a filter read the
clock as well. Size is bounded before a value is made: in operators, `~`, slices, filters, methods and blocks of
text. Nothing is computed while compiling, where no limit would hold.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from types import BuiltinMethodType, FrameType, MethodDescriptorType, MethodType, WrapperDescriptorType
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.tests

from .template_filters import BOUNDED_FILTERS, COMPARING_FUNCTIONS, NUMERIC_TESTS, ROW_FILTERS
from .template_meter import (
    DICT_VIEWS,
    KEPT_ITEM_CHARS,
    MAX_VALUE,
    TemplateLimit,
    TemplateMeter,
    TemplateTimeout,
    bounded_list,
    check_size,
    text_size,
)
from .template_strings import BOUNDED_METHODS, bounded_percent, check_add, check_format_fields, check_repeat
from .template_variables import expected_names

__all__ = ["COMPILE_FAULTS", "BoundedTemplate", "TemplateLimit", "TemplateRefusal", "TemplateTimeout"]

FILENAME = "<chat template>"
MAX_SOURCE = 1_000_000  # characters; those of well-known models have up to 20,000
MAX_DATE_FORMAT = 256
# Errors that compiling may raise; the last four come from deep nesting, or from numbers of thousands of digits.
COMPILE_FAULTS = (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError, ValueError)


class TemplateRefusal(jinja2.TemplateRuntimeError):
    """Error for a template that called `raise_exception`."""


class BoundedTemplate:
    """A compiled template; `variables` are the names that it expects to be given.

    Raises one of COMPILE_FAULTS.
    """

    def __init__(self, source: str, *, max_seconds: float, max_chars: int) -> None:
        if len(source) > MAX_SOURCE:
            raise TemplateLimit(f"it is longer than {MAX_SOURCE} characters")
        self._environment = environment = _BoundedEnvironment()
        self._template = environment.compile_template(source)
        self.variables = expected_names(environment.parse(source)) - environment.globals.keys()
        self._max_seconds = max_seconds
        self._max_chars = max_chars

    def render(self, values: Mapping[str, Any], max_seconds: float | None = None) -> str:
        """Return the rendered text. `max_seconds`: a time limit below the template's usual one; None: the usual one.

        Raises TemplateLimit, TemplateRefusal or whatever error the template ran into.
        """
        meter = TemplateMeter(self._max_seconds if max_seconds is None else min(max_seconds, self._max_seconds))
        try:
            with self._environment.metered(meter), _RenderDeadline(meter):
                parts, total = [], 0
                for part in self._template.generate(**values):
                    total += len(part)
                    if total > self._max_chars:
                        raise TemplateLimit(f"the text is longer than {self._max_chars} characters")
                    parts.append(part)
                return "".join(parts)
        except MemoryError as error:
            raise TemplateLimit("there is not enough memory for what it makes") from error


class _RenderDeadline:
    """Context in which every line of template code that runs on this thread checks the meter's clock."""

    def __init__(self, meter: TemplateMeter) -> None:
        self._meter = meter
        self._before: Any = None

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._on_call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _on_call(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        return self._on_line if frame.f_code.co_filename == FILENAME else None

    def _on_line(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        self._meter.tick()
        return self._on_line


class _GenerationTag(jinja2.ext.Extension):
    """Jinja extension for `{% generation %}…{% endgeneration %}`, which marks assistant text for training. Only the
    body of the block is rendered.
    """

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedCodeGenerator(jinja2.compiler.CodeGenerator):
    """Code generator that writes a call of the environment's method where Jinja would write plain Python."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.sliced(" if isinstance(node.arg, jinja2.nodes.Slice) else "(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: jinja2.compiler.Frame) -> None:
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        self.write("environment.comparable(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: jinja2.compiler.Frame) -> None:
        self.write("{")
        for item in node.items:
            self.write("environment.comparable(")
            self.visit(item.key, frame)
            self.write("): ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def visit_Compare(self, node: jinja2.nodes.Compare, frame: jinja2.compiler.Frame) -> None:
        self.write("(environment.comparable(")
        self.visit(node.expr, frame)
        self.write(")")
        for operand in node.ops:
            looked = "searchable" if operand.op in ("in", "notin") else "comparable"
            self.write(f" {jinja2.compiler.operators[operand.op]} environment.{looked}(")
            self.visit(operand.expr, frame)
            self.write(")")
        self.write(")")

    def visit_ScopedEvalContextModifier(
        self, node: jinja2.nodes.ScopedEvalContextModifier, frame: jinja2.compiler.Frame
    ) -> None:
        self.fail("autoescape has no place in a chat template", node.lineno)


class _BoundedFormatMethod:
    """Replacement for a string's `format` method whose result is bounded in size."""

    def __init__(self, environment: _BoundedEnvironment, text: str) -> None:
        self._environment, self._text = environment, text

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        check_format_fields(self._text, args, kwargs)
        return _BoundedFormatter(self._environment).vformat(self._text, args, kwargs)


class _BoundedFormatter(jinja2.sandbox.SandboxedFormatter):
    """Formatter that counts the size of every field, since a field may name a part of a value that is larger than the
    value looks.
    """

    _size = 0

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        value, first = super().get_field(field_name, args, kwargs)
        self._size = check_size(self._size + text_size(value))
        return value, first


class _BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "-", "*", "**", "%"])
    code_generator_class = _BoundedCodeGenerator

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationTag],
            optimized=False,
            cache_size=0,
            finalize=_output_value,
        )
        self._rendering = threading.local()
        tests: Any = jinja2.tests.TESTS
        self.filters = {name: self._metered(self._rows(name, function)) for name, function in BOUNDED_FILTERS.items()}
        self.tests = {name: self._test(name, function) for name, function in tests.items()}
        self.globals = {name: self.globals[name] for name in ("range", "dict", "namespace", "cycler", "joiner")}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.concat = self.concatenate  # type: ignore[method-assign]  # of blocks and macros

    def compile_template(self, source: str) -> jinja2.Template:
        code = self.compile(source, filename=FILENAME)
        return self.template_class.from_code(self, code, self.make_globals(None))

    @contextmanager
    def metered(self, meter: TemplateMeter) -> Iterator[None]:
        """Let `meter` measure and limit all template rendering by this thread within the `with` block."""
        self._rendering.meter = meter
        try:
            yield
        finally:
            del self._rendering.meter

    @property
    def _meter(self) -> TemplateMeter:
        meter: TemplateMeter = self._rendering.meter
        return meter

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._meter.tick()
        return super().getitem(obj, self.comparable(argument))

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._meter.tick()
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if isinstance(value, BuiltinMethodType) and value.__name__ == "format" and isinstance(value.__self__, str):
            return _BoundedFormatMethod(self, str(value.__self__))
        return None

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        self._meter.tick()
        if operator == "**":
            raise TemplateLimit("operator ** is not allowed in a chat template")
        if operator == "%" and isinstance(left, str):
            return self._meter.charge(bounded_percent(left, right))
        if operator == "-":  # the difference of two views of mappings is a set
            self.comparable(left)
            self.comparable(right)
        elif operator == "+":
            check_add(left, right)
        elif operator == "*":
            check_repeat(left, right)
        result = self._meter.charge(super().call_binop(context, operator, left, right), KEPT_ITEM_CHARS)
        if isinstance(result, tuple):  # a tuple may become a key, which is hashed
            text_size(result)
        return result

    def call(self, context: jinja2.runtime.Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._meter.tick()
        _check_arguments(args, kwargs)
        self._meter.spend(KEPT_ITEM_CHARS * (len(args) + len(kwargs)))  # a macro keeps them, and a cycler
        return self._meter.charge(super().call(context, _bounded_method(function), *args, **kwargs))

    def concatenate(self, parts: Iterable[Any]) -> str:
        texts, size = [], 0
        for part in parts:
            size = check_size(size + text_size(part))
            texts.append(str(part))
        self._meter.spend(size)
        return "".join(texts)

    def sliced(self, value: Any) -> Any:
        """Count a slice that a template made against the limit, and return it. A slice is no longer than its source,
        but there may be many of them.
        """
        return self._meter.charge(value, KEPT_ITEM_CHARS)

    def comparable(self, value: Any) -> Any:
        """Return the value, after checking that comparing or hashing it takes bounded time."""
        if isinstance(value, (list, tuple, dict, set, *DICT_VIEWS)):
            text_size(value)
        return value

    def searchable(self, value: Any) -> Any:
        """Return the value, after checking that looking for something in it takes bounded time; a mapping only looks up
        a key.
        """
        return value if isinstance(value, dict) else self.comparable(value)

    def _rows(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter that yields lists one by one, so that each of them is counted."""
        if name not in ROW_FILTERS:
            return function

        def rows(*args: Any, **kwargs: Any) -> Iterator[Any]:
            for row in function(*args, **kwargs):
                self._meter.tick()
                yield self._meter.charge(row, KEPT_ITEM_CHARS)

        rows.__dict__.update(getattr(function, "__dict__", {}))
        return rows

    def _metered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._meter.tick()
            _check_arguments(args, kwargs)
            return self._meter.charge(function(*args, **kwargs))

        # Jinja marks filters that want its context or environment with an attribute.
        bounded.__dict__.update(getattr(function, "__dict__", {}))
        return bounded

    def _test(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def bounded(*args: Any) -> Any:
            self._meter.tick()
            if name in COMPARING_FUNCTIONS:
                for value in args:
                    text_size(value)
            elif name in NUMERIC_TESTS and not all(isinstance(value, int | float) for value in args):
                raise TypeError(f"{name}: expected numbers")  # with a text, % would format it
            return function(*args)

        bounded.__dict__.update(getattr(function, "__dict__", {}))
        return bounded


@jinja2.pass_context
def _output_value(context: jinja2.runtime.Context, value: Any) -> Any:
    """Check the size of a value that `{{ … }}` writes, and return it. It takes the context so that Jinja does not call
    it at compile time for constants.
    """
    text_size(value)
    return value


def _bounded_method(function: Any) -> Any:
    """Return the bounded form of a method of a built-in type. Raises jinja2.sandbox.SecurityError if there is none."""
    if isinstance(function, MethodDescriptorType | WrapperDescriptorType):
        raise jinja2.exceptions.SecurityError("a method without its object is not called")
    if function is dict:
        return _build_dict
    if not isinstance(function, BuiltinMethodType | MethodType):
        return function
    owner, name = function.__self__, function.__name__
    if isinstance(owner, str) and name in BOUNDED_METHODS:
        return partial(BOUNDED_METHODS[name], str(owner))
    if isinstance(owner, list | tuple) and name in ("index", "count", "copy"):
        text_size(owner)
        return function
    if isinstance(owner, dict) and name in ("items", "keys", "values", "copy"):
        return function
    if (isinstance(owner, dict) and name == "get") or (
        isinstance(owner, jinja2.runtime.LoopContext) and name == "changed"
    ):
        return partial(_call_comparing, function)
    if isinstance(function, MethodType) and not isinstance(owner, str):
        return function
    raise jinja2.exceptions.SecurityError(f"{type(owner).__name__}.{name} is not allowed in a chat template")


def _call_comparing(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that compares or hashes its first argument, after checking that argument's size."""
    for value in args[:1]:
        text_size(value)
    return function(*args)


def _build_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Build a dict as `dict` does, after checking keys that are given in pairs, as those have not been hashed
    before.
    """
    pairs = [arg if isinstance(arg, Mapping) else bounded_list(arg) for arg in args]
    for value in pairs:
        if not isinstance(value, Mapping):
            text_size(value)
    return dict(*pairs, **kwargs)


def _check_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    # A width or a count is how one call makes a huge value.
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_VALUE:
            raise TemplateLimit(f"argument {value if abs(value) < 2**64 else '…'} is above {MAX_VALUE}")


def _raise_exception(message: object) -> None:
    text_size(message)
    raise TemplateRefusal(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > MAX_DATE_FORMAT:
        raise TemplateLimit(f"a format of a date is longer than {MAX_DATE_FORMAT} characters")
    return datetime.now().strftime(form)
