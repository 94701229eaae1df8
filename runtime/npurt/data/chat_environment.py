"""The jinja2 environment in which chat templates are rendered, with what the reference puts in it.

Apart from `template.py` because importing jinja2 takes a noticeable part of a cold start, and plain text needs none.

A template comes from a model folder and is as trustworthy as that: it runs in jinja2's immutable sandbox, and, as in
the reference (`apply_chat_template`), `dict` and `namespace` are stand-ins that give no way to Python's internals.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# What a template can raise: jinja2's own errors, and Python's where an expression does not fit its values.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class GenerationBlocks(Extension):
    """`{% generation %} … {% endgeneration %}`: renders its body, and notes where in the output it stands."""

    tags = {"generation"}  # noqa: RUF012 -- as jinja2 declares it

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.written: list[str] | None = None  # the pieces rendered before, while a rendering is watched
        self.blocks: list[tuple[int, str]] = []

    def parse(self, parser: Parser) -> nodes.Node:
        """Turn the block into a call of `_render_block` around its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render_block"), [], [], body).set_lineno(line)

    def _render_block(self, caller: Callable[[], str]) -> str:
        text = caller()
        if self.written is not None:
            self.blocks.append((sum(map(len, self.written)), text))
        return text

    def watch(self, pieces: Iterable[str]) -> tuple[str, list[tuple[int, int]]]:
        """Join the pieces of a rendering; the text, and the (start, end) of the generation blocks in it."""
        self.written, self.blocks = [], []
        try:
            # One by one: a block asks for what was written before it while the next piece is being made.
            for piece in pieces:
                self.written.append(piece)
            text = "".join(self.written)
        finally:
            self.written = None
        # A block inside a macro or a `set` is not written where it is rendered; only true places are given.
        spans = [(start, start + len(block)) for start, block in self.blocks if text.startswith(block, start) and block]
        return text, spans


class _Dict:
    """`dict(...)` without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace(...)` that takes no names with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        for name in dict(*rest, **kwargs):
            _refuse_private(name)
        Namespace.__init__(self, *rest, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not set {name!r} on a namespace")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(  # the reference's signature: templates pass these by position or by name
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """`tojson` without jinja2's escaping for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def chat_environment(clock: dt.datetime) -> tuple[jinja2.Environment, GenerationBlocks]:
    """An environment for chat templates whose `strftime_now` tells `clock`, and its record of generation blocks."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, LoopControlExtension]
    )
    blocks = cast("GenerationBlocks", environment.extensions[GenerationBlocks.identifier])
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": clock.strftime,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment, blocks
