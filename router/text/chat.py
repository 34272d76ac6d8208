"""Chat messages to prompt text, with the model's own Jinja2 template.

Templates are written for `apply_chat_template` of Hugging Face's transformers, so the environment
offers the same features: trimmed blocks, `raise_exception`, `tojson` without HTML escapes,
`strftime_now`, loop controls and a `generation` block.

A template comes with the weights and is not trusted. Jinja2's sandbox keeps a template from the
process's objects but bounds neither time nor memory. So only the templates of the built-in models,
recognized by their hash, are compiled and rendered in the router's own process; every other
template runs in a child process (`router.text.processes`).
"""

import datetime as dt
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.runtime
import jinja2.sandbox
from jinja2 import nodes
from jinja2.compiler import Frame
from jinja2.parser import Parser
from markupsafe import Markup

from router.text import taint
from router.text.errors import ChatTemplateError

# sha256 of each trusted template's source: SmolLM2-135M-Instruct's.
_KNOWN_TEMPLATES = frozenset({"872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788"})
_MAX_SOURCE_CHARS = 1_000_000

# Jinja2's filters that only call methods of `TaintedText`, or return items unchanged.
_FILTERS_THAT_KEEP_MARKS = frozenset([
    "attr", "batch", "capitalize", "d", "default", "dictsort", "first", "groupby", "items", "join",
    "last", "list", "lower", "map", "max", "min", "random", "reject", "rejectattr", "replace",
    "reverse", "select", "selectattr", "slice", "sort", "string", "sum", "trim", "unique", "upper",
])  # fmt: skip


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; rendered as plain text."""

    tags = {"generation"}  # noqa: RUF012 jinja2's own shape

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Code(jinja2.compiler.CodeGenerator):
    """Compiles `a ~ b` to a call of the environment's `concat`, and folds no constants."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox in which the marks of `TaintedText` survive a template's string operations."""

    code_generator_class = _Code
    concat = staticmethod(taint.join)
    intercepted_binops = frozenset(["%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
            finalize=lambda value: taint.join([value]),
        )
        # Whether rendering converted the caller's text into a type that carries no marks.
        self.has_lost_marks = False
        self.filters |= {"tojson": _tojson, "join": _join}
        self.filters = {
            name: self._tracked(function, keeps_marks=name in _FILTERS_THAT_KEEP_MARKS)
            for name, function in self.filters.items()
        }
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        is_ours = attr == "marks" and isinstance(obj, taint.TaintedText)
        return not is_ours and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        receiver = getattr(value, "__self__", None)
        if not isinstance(receiver, taint.TaintedText):
            return super().wrap_str_format(value)
        formatted = super().wrap_str_format(getattr(taint.plain(receiver), value.__name__, None))
        if formatted is None:
            return None
        return lambda *args, **kwargs: taint.derived(formatted(*args, **kwargs), receiver)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        receiver = getattr(obj, "__self__", None)
        if type(receiver) is str and (obj.__name__ == "join" or taint.is_tainted(args)):
            obj = getattr(taint.TaintedText(receiver, taint.marks_of(receiver)), obj.__name__)
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(obj, jinja2.runtime.Macro):
            return result
        return self._derived(result, receiver, args, kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        return self._derived(super().call_binop(context, operator, left, right), left, right)

    def _tracked(self, function: Callable[..., Any], *, keeps_marks: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def tracked(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if isinstance(result, taint.TaintedText) and not keeps_marks:
                return taint.derived(taint.plain(result), result)
            return self._derived(result, args, kwargs)

        return tracked

    def _derived(self, result: Any, *sources: Any) -> Any:
        if isinstance(result, (bytes, Markup)) and taint.is_tainted(sources):
            self.has_lost_marks = True
            return result
        return taint.derived(result, *sources)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return dt.datetime.now().strftime(pattern)  # noqa: DTZ005 local, as templates expect


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja2's own `tojson` escapes for HTML, which would put &lt; into prompts.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, value: Any, d: str = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(environment, attribute), value)
    separator = taint.join([d])
    return taint.TaintedText(separator, taint.marks_of(separator)).join(
        taint.join([item]) for item in value
    )


class ChatTemplate:
    """A template's source and the special-token names that the template may use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compiles nothing: compiling an untrusted template may never end."""
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.is_known = hashlib.sha256(source.encode(errors="replace")).hexdigest() in (
            _KNOWN_TEMPLATES
        )

    def __reduce__(self) -> Any:
        return ChatTemplate, (self.source, self.special_tokens)

    @functools.cached_property
    def _environment(self) -> _Environment:
        return _Environment()

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        if len(self.source) > _MAX_SOURCE_CHARS:
            raise ChatTemplateError(
                f"the model's chat template has {len(self.source)} characters, "
                f"{_MAX_SOURCE_CHARS} are compiled at most"
            )
        try:
            return self._environment.from_string(self.source)
        except Exception as error:  # a malformed template can raise anything from the compiler
            raise ChatTemplateError(
                f"the model's chat template is broken: {_described(error)}"
            ) from error

    def compile(self) -> None:
        """Raises ChatTemplateError when the template is not valid Jinja2."""
        assert self._template

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> tuple[str, str]:
        """The prompt rendered from messages, oldest first: its text and one mark per character.

        Raises ChatTemplateError with the template's message, e.g. that roles must alternate.
        """
        template = self._template
        self._environment.has_lost_marks = False
        try:
            text = template.render(
                messages=taint.taint(list(messages)),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
            text.encode()  # a lone surrogate is not valid text, and no tokenizer accepts one
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses them: {error}") from error
        except Exception as error:  # a template is a program and can fail in any way
            raise ChatTemplateError(
                f"the chat template fails on them: {_described(error)}"
            ) from error
        is_lost = self._environment.has_lost_marks
        marks = taint.UNKNOWN * len(text) if is_lost else taint.marks_of(text)
        return taint.plain(text), marks


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
