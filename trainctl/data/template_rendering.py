"""Chat templates rendered within bounds, in a process that can be ended. No torch.

A template is code of whoever published the tokenizer. Jinja's sandbox keeps it from files and
modules, and not from computing forever or filling the memory: some of that is one call into C,
which nothing inside the process interrupts. So a fork of this process makes the text: it has all
that is imported, and answers one request after the other over a pipe.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

from trainctl.errors import TrainctlError

SECONDS = 10.0
"""For one text, which takes a millisecond: far more than the slowest machine needs."""

MEMORY_BYTES = 1 << 30
"""Beyond what the process had when it was forked."""

CHARACTERS = 1_000_000
CHARACTERS_FOR_BYTE = 20
"""Longest text: so much, and so many times the conversation, parts of which it may repeat."""

OF_TEMPLATES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What an expression of a template may raise, beside what Jinja does."""

Spans = list[tuple[int, int]]


class RefusedByTemplate(Exception):
    """The template raised an error for this conversation; its text is the reason."""


@dataclass(frozen=True, slots=True)
class _Renderer:
    """The fork that renders."""

    owner: int
    """Process that forked it; another one forks its own."""
    pid: int
    """Its number."""
    connection: Connection
    """Our end of the pipe."""


_lock = Lock()
_renderer: _Renderer | None = None


def render(
    template: str,
    chat: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    prompts: bool,
    marks: bool,
) -> tuple[str, Spans]:
    """Return the text that a template makes of a conversation, and the spans that it marks.

    Args:
        tools: JSON schemas of the tools that may be called.
        variables: What else the template is given, by name.
        prompts: Whether to add the prompt of an answer.
        marks: Whether to look for `{% generation %}` blocks.

    Raises:
        RefusedByTemplate: The template raised an error.
        TrainctlError: It takes more time, memory or text than any template needs.
    """
    from transformers.utils import chat_template_utils  # noqa: F401  the fork has it then

    request = pickle.dumps(
        (template, list(chat), [*tools] or None, dict(variables), prompts, marks)
    )
    with _lock:
        renderer = _started()
        try:
            kind, *found = _ask(renderer.connection, request)
        except BaseException:  # of an interrupt too: the next text would get this one's answer
            _end(renderer)
            raise
    if kind == "refused":
        raise RefusedByTemplate(found[0])
    if kind == "out of bounds":
        raise _out_of_bounds(found[0])
    return found[0], found[1]


def _ask(connection: Connection, request: bytes) -> Sequence[Any]:
    try:
        connection.send_bytes(request)
        if not connection.poll(SECONDS):
            raise _out_of_bounds(f"does not end within {SECONDS:g} s")
        answer: Sequence[Any] = connection.recv()
    except (EOFError, OSError):
        raise _out_of_bounds("ended the process that rendered it") from None
    return answer


def _out_of_bounds(what: str) -> TrainctlError:
    return TrainctlError(
        f"the chat template {what}",
        hint="a template from another source, in data.chat_template: this one is damaged, or was "
        "made to do that",
    )


def _started() -> _Renderer:
    """Return this process's renderer; fork it where there is none."""
    global _renderer
    if _renderer is None or _renderer.owner != os.getpid():
        ours, its = Pipe()
        pid = os.fork()
        if pid == 0:
            _serve(its)
        its.close()
        _renderer = _Renderer(os.getpid(), pid, ours)
    return _renderer


def _end(renderer: _Renderer) -> None:
    """Kill a renderer that did not answer; the next text gets another one."""
    global _renderer
    _renderer = None
    renderer.connection.close()
    os.kill(renderer.pid, signal.SIGKILL)
    os.waitpid(renderer.pid, 0)


def _serve(connection: Connection) -> NoReturn:
    """Answer requests until the process that asks has ended."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        while True:
            connection.send(_answer(connection.recv_bytes()))
    except BaseException:
        os._exit(1)


def _answer(request: bytes) -> tuple[Any, ...]:
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    template, chat, tools, variables, prompts, marks = pickle.loads(request)
    try:
        texts, spans = render_jinja_template(
            [chat],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=marks,
            add_generation_prompt=prompts,
            **variables,
        )
    except MemoryError:
        return "out of bounds", f"takes more than {MEMORY_BYTES >> 20:,} MiB"
    except (TemplateError, *OF_TEMPLATES) as error:
        return "refused", str(error)
    most = CHARACTERS + CHARACTERS_FOR_BYTE * len(request)
    if len(texts[0]) > most:
        return (
            "out of bounds",
            f"makes {len(texts[0]):,} characters of a conversation, and at most {most:,} are taken",
        )
    return "text", texts[0], spans[0] if marks else []
