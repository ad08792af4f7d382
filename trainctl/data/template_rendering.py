"""Render chat templates within limits, in a process that can be killed. No torch.

A template is code of whoever published the tokenizer. Jinja's sandbox keeps it from files and
modules, but not from computing forever or filling the memory, and a single call into C cannot be
interrupted within the process. So a fork of this process renders: it has all modules imported, and
answers requests (`trainctl.child_processes`), one after the other.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

from trainctl.child_processes import Channel, NoReply, ReplyTimeout, parse_object, serve
from trainctl.errors import TrainctlError
from trainctl.readers.conversations import Message

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

REPLY_BYTES = 1 << 20
REPLY_BYTES_FOR_CHARACTER = 40
"""Limit of a reply: a character of the longest text takes 12 bytes as JSON, a span more."""

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
    owner: int
    """Process id of the parent. Another process forks its own renderer."""
    pid: int
    channel: Channel


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
    limit = REPLY_BYTES + REPLY_BYTES_FOR_CHARACTER * _most_characters(request)
    with _lock:
        renderer = _get_renderer()
        try:
            reply = parse_object(renderer.channel.ask(request, SECONDS, limit))
        except BaseException as error:  # also an interrupt: the renderer is at work on this text
            _kill_renderer(renderer)
            if isinstance(error, ReplyTimeout):
                raise _limit_error(f"does not end within {SECONDS:g} s") from None
            if isinstance(error, NoReply):
                raise _limit_error("ended the process that rendered it") from None
            raise
    match reply:
        case {"text": str(text), "spans": list(spans)}:
            return text, [(begin, end) for begin, end in spans]
        case {"refused": str(reason)}:
            raise RefusedByTemplate(reason)
    raise _limit_error(str(reply.get("out of bounds")))


def _limit_error(what: str) -> TrainctlError:
    return TrainctlError(
        f"the chat template {what}",
        hint="a template from another source, in data.chat_template: this one is damaged, or was "
        "made to do that",
    )


def _get_renderer() -> _Renderer:
    global _renderer
    if _renderer is None or _renderer.owner != os.getpid():
        ours, its = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _serve_requests(its)
        its.close()
        _renderer = _Renderer(os.getpid(), pid, Channel(ours))
    return _renderer


def _kill_renderer(renderer: _Renderer) -> None:
    """Kill a renderer that did not answer; the next text forks another one."""
    global _renderer
    _renderer = None
    renderer.channel.close()
    os.kill(renderer.pid, signal.SIGKILL)
    os.waitpid(renderer.pid, 0)


def _serve_requests(connection: socket.socket) -> NoReturn:
    """Answer requests until the parent process has ended."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        serve(lambda request: json.dumps(_render_request(request)).encode(), connection)
    except BaseException:
        os._exit(1)


def _render_request(request: bytes) -> dict[str, Any]:
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
        return {"out of bounds": f"takes more than {MEMORY_BYTES >> 20:,} MiB"}
    except (TemplateError, *TEMPLATE_ERRORS) as error:
        return {"refused": str(error)[:CHARACTERS]}
    count, most = len(texts[0]), _most_characters(request)
    if count > most:
        found = f"makes {count:,} characters of a conversation, and at most {most:,} are taken"
        return {"out of bounds": found}
    return {"text": texts[0], "spans": spans[0] if marks else []}


def _most_characters(request: bytes) -> int:
    return CHARACTERS + CHARACTERS_FOR_BYTE * len(request)


CALLS, REASONING, SYSTEM, TOOLS = "tool calls", "reasoning", "a system message", "tools"
"""Kinds of fields that a template may leave out."""
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def has_fields(messages: Sequence[Message], tools: Collection[Any]) -> bool:
    """Return True if a conversation has fields that some templates leave out."""
    kinds: list[str] = [TOOLS] if tools else []

    def stand_in(kind: str) -> str:
        kinds.append(kind)
        return ""

    for message in messages:
        with_stand_ins(message, stand_in)
    return bool(kinds)


def with_stand_ins(message: Message, stand_in: Callable[[str], str]) -> Message:
    """Replace each field of a message that a template may leave out by a text to look for."""
    found = dict(message)
    for key in _REASONING_KEYS:
        if found.get(key):
            found[key] = stand_in(REASONING)
    content = found.get("content") or ""
    head, end, rest = content.partition("</think>")
    if end and message["role"] == "assistant":
        opening, begin, _ = head.rpartition("<think>")
        found["content"] = f"{opening}{begin}{stand_in(REASONING)}{end}{rest}"
    elif content and message["role"] in ("system", "developer"):
        found["content"] = stand_in(SYSTEM)
    if found.get("tool_calls"):
        found["tool_calls"] = [
            with_stand_in_name(call, CALLS, stand_in) for call in found["tool_calls"]
        ]
    return found


def with_stand_in_name(call: Any, kind: str, stand_in: Callable[[str], str]) -> Any:
    """Replace the name of a tool call, or of a tool's schema, by a text to look for."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": with_stand_in_name(call["function"], kind, stand_in)}
    return {**call, "name": stand_in(kind)}
