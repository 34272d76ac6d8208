"""Chat messages to prompt text, with the model's own Jinja2 template.

Templates are written against the conventions of Hugging Face's `apply_chat_template`; what they
may use is fixed by that: trimmed blocks, `raise_exception`, `tojson` that keeps characters as
they are, `strftime_now`, loop controls and a `generation` block that marks what the model said.
A template comes with the weights and is not trusted: it runs in Jinja2's sandbox.
"""

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from router.text.errors import ChatTemplateError


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; here it is only text."""

    tags = {"generation"}  # noqa: RUF012 jinja2's own shape

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
    # Jinja2's own filter escapes for HTML, which would put &lt; into prompts.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """A compiled template and the names of the model's special tokens it may use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ChatTemplateError when the template itself is not valid Jinja2."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is broken: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt text of the messages, oldest first.

        Raises ChatTemplateError with the template's own words, e.g. that roles must alternate.
        """
        try:
            return self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses them: {error}") from error
        except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
            # A template is a program; what it does with odd messages is not ours to foresee.
            raise ChatTemplateError(
                f"the chat template fails on them: {type(error).__name__}: {error}"
            ) from error
