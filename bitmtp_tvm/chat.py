"""Messages to the text of a prompt, by the template that a checkpoint brings along."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bitmtp_tvm.errors import BitMTPError, UsageError

Message = Mapping[str, Any]


class ChatTemplate:
    """A Jinja template, rendered as transformers renders it: sandboxed, for it is foreign code.

    `special_tokens`: what it may call by name ("bos_token", "eos_token", …). `source`: the place of
    the template, for messages.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str], source: str) -> None:
        self._text = text
        self._special_tokens = dict(special_tokens)
        self._source = source

    def render(self, messages: Sequence[Message]) -> str:
        """The text after which the assistant's answer to `messages` follows.

        A message is {"role": "system" | "user" | "assistant", "content": text}. Special tokens
        stand in the text as they are written. Raises UsageError for messages that are none, or that
        the template refuses; BitMTPError for a template that is damaged.
        """
        _check_messages(messages)
        template = self._template
        try:
            return template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        # A template can run into any exception of Python's.
        except Exception as fault:
            raise UsageError(f"{self._source} does not take these messages: {fault}") from fault

    @cached_property
    def _template(self) -> jinja2.Template:
        """Compiled on first use: a damaged template is no fault of a run without it."""
        try:
            return _environment().from_string(self._text)
        except (jinja2.TemplateError, RecursionError, ValueError) as fault:
            raise BitMTPError(f"{self._source} is not a readable chat template: {fault}") from fault


def read_template(path: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """The template in the file at `path`; BitMTPError when it cannot be read."""
    try:
        return ChatTemplate(path.read_bytes().decode(), special_tokens, str(path))
    except OSError as fault:
        raise BitMTPError(f"{path} cannot be read: {fault.strerror}") from fault
    except UnicodeDecodeError as fault:
        raise BitMTPError(f"{path} is damaged, it is not valid UTF-8: compile it again") from fault


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model wrote: here it changes nothing."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise UsageError("there is no message: give at least one")
    for place, message in enumerate(messages):
        good = isinstance(message, Mapping) and all(
            isinstance(message.get(key), str) for key in ("role", "content")
        )
        if not good:
            raise UsageError(
                f'message {place} is no object with a "role" and a "content", both of them texts'
            )
