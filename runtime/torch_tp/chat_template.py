"""Chat templates: jinja from the checkpoint, run in a sandbox, since a checkpoint is somebody else's text."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The template refused the messages, or is damaged; the message says which in one line."""


class ChatTemplate:
    """One compiled template. `special_tokens` (bos_token, eos_token, …) are visible to it as variables."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = time.strftime
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the checkpoint's chat template is damaged: {_line(error)}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt text. Further `variables` (tools, enable_thinking, …) reach the template as they are.

        Raises: ChatTemplateError when the template refuses (a role it does not know, turns out of order) or fails.
        """
        visible = [{name: value for name, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(
                messages=visible, add_generation_prompt=add_generation_prompt, **{**self._special_tokens, **variables}
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError, ArithmeticError) as error:
            raise ChatTemplateError(f"the chat template refused the messages: {_line(error)}") from error


class _Generation(Extension):
    """{% generation %} … {% endgeneration %} marks the assistant's part for training; here it is only text."""

    tags = {"generation"}  # noqa: RUF012 - jinja reads a set from the class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Plain JSON: jinja's own filter escapes for HTML, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
