"""Render chat templates within limits, in a process that can be killed. No torch.

A template is code of whoever published the tokenizer. Jinja's sandbox keeps it from files and
modules, but not from computing forever or filling the memory, and a single call into C cannot be
interrupted within the process. So a fork of this process renders: it has all modules imported, and
answers requests over a pipe, one after the other.
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
"""Time limit for one text: far more than the slowest machine needs, as a text takes a
millisecond.
"""

MEMORY_BYTES = 1 << 30
"""Memory limit beyond what the process had when it was forked."""

CHARACTERS = 1_000_000
CHARACTERS_FOR_BYTE = 20
"""The longest text has `CHARACTERS`, and this many more per byte of the request, since a
template may repeat parts of the conversation.
"""

TEMPLATE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions that an expression in a template may raise, besides Jinja's own."""

Spans = list[tuple[int, int]]


class RefusedByTemplate(Exception):
    """Error that a template raised for a conversation; the message is the reason."""


@dataclass(frozen=True, slots=True)
class _Renderer:
    """The forked process that renders."""

    owner: int
    """Process id of the parent. Another process forks its own renderer."""
    pid: int
    connection: Connection


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
    """Render a conversation and return the text with the spans that the template marks.

    Args:
        tools: JSON schemas of the tools that may be called.
        marks: Whether to return the spans of `{% generation %}` blocks.

    Raises:
        RefusedByTemplate: The template raised an error.
        TrainctlError: The template exceeds the limits on time, memory or length of text.
    """
    from transformers.utils import chat_template_utils  # noqa: F401  the fork has it then

    request = pickle.dumps(
        (template, list(chat), [*tools] or None, dict(variables), prompts, marks)
    )
    with _lock:
        renderer = _get_renderer()
        try:
            kind, *found = _send_request(renderer.connection, request)
        except BaseException:  # also an interrupt: a late answer would be the next text's
            _kill_renderer(renderer)
            raise
    if kind == "refused":
        raise RefusedByTemplate(found[0])
    if kind == "out of bounds":
        raise _limit_error(found[0])
    return found[0], found[1]


def _send_request(connection: Connection, request: bytes) -> Sequence[Any]:
    try:
        connection.send_bytes(request)
        if not connection.poll(SECONDS):
            raise _limit_error(f"does not end within {SECONDS:g} s")
        answer: Sequence[Any] = connection.recv()
    except (EOFError, OSError):
        raise _limit_error("ended the process that rendered it") from None
    return answer


def _limit_error(what: str) -> TrainctlError:
    return TrainctlError(
        f"the chat template {what}",
        hint="a template from another source, in data.chat_template: this one is damaged, or was "
        "made to do that",
    )


def _get_renderer() -> _Renderer:
    """Return this process's renderer, and fork it first if there is none."""
    global _renderer
    if _renderer is None or _renderer.owner != os.getpid():
        ours, its = Pipe()
        pid = os.fork()
        if pid == 0:
            _serve_requests(its)
        its.close()
        _renderer = _Renderer(os.getpid(), pid, ours)
    return _renderer


def _kill_renderer(renderer: _Renderer) -> None:
    """Kill a renderer that did not answer; the next text forks another one."""
    global _renderer
    _renderer = None
    renderer.connection.close()
    os.kill(renderer.pid, signal.SIGKILL)
    os.waitpid(renderer.pid, 0)


def _serve_requests(connection: Connection) -> NoReturn:
    """Answer requests until the parent process has ended."""
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
            connection.send(_render_request(connection.recv_bytes()))
    except BaseException:
        os._exit(1)


def _render_request(request: bytes) -> tuple[Any, ...]:
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
    except (TemplateError, *TEMPLATE_ERRORS) as error:
        return "refused", str(error)
    most = CHARACTERS + CHARACTERS_FOR_BYTE * len(request)
    if len(texts[0]) > most:
        return (
            "out of bounds",
            f"makes {len(texts[0]):,} characters of a conversation, and at most {most:,} are taken",
        )
    return "text", texts[0], spans[0] if marks else []
