"""Fields of conversations that some chat templates leave out, and texts to look for in their place.

A template writes a field if the rendering has the text that stands in for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from trainctl.readers.conversations import Message

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
