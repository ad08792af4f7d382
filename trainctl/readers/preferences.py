"""Preference pairs in records of the published shapes, and their problems.

| a record has | |
|---|---|
| `prompt`, `chosen`, `rejected` as texts | the answers continue the prompt |
| `prompt`, `chosen`, `rejected` as lists of messages | `prompt` ends with the user's message |
| `chosen` and `rejected` as lists of messages | the common beginning of both is the prompt |

Records with messages may have `tools`. All shapes are converted to one: the prompt and the two
answers. Its JSON is the text of the document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainctl.readers.conversations import BadConversation, Shape, conversation_of

ANSWERS = ("chosen", "rejected")


def pair_of(record: object) -> dict[str, Any]:
    """Return the pair of a record: `prompt`, `chosen`, `rejected`, and `tools` where there are any.

    The three are either texts or lists of messages.

    Raises:
        BadConversation: It has no such shape, an answer is empty, both answers are equal, or a
            conversation is malformed.
    """
    if not isinstance(record, Mapping):
        raise BadConversation("not an object with a pair of answers in it")
    missing = [key for key in ANSWERS if record.get(key) is None]
    if missing:
        has = ", ".join(map(repr, list(record)[:8])) or "nothing"
        raise BadConversation(
            f"it has {has}, and no {missing[0]!r}: a pair has prompt, chosen, rejected; or chosen "
            "and rejected as lists of messages that begin alike"
        )
    are_texts = isinstance(record["chosen"], str) and isinstance(record["rejected"], str)
    pair = _of_texts(record) if are_texts else _of_messages(record)
    if pair["chosen"] == pair["rejected"]:
        raise BadConversation("the chosen and the rejected answer are the same")
    return pair


def _of_texts(record: Mapping[str, Any]) -> dict[str, Any]:
    prompt = record.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise BadConversation("two texts need a `prompt` that is a text, and not an empty one")
    for key in ANSWERS:
        if not record[key]:
            raise BadConversation(f"the {key} answer is empty")
    return {key: record[key] for key in ("prompt", *ANSWERS)}


def _of_messages(record: Mapping[str, Any]) -> dict[str, Any]:
    prompt = record.get("prompt")
    before = list(prompt) if isinstance(prompt, list) else []
    whole, tools = {}, {}
    for key in ANSWERS:
        if not isinstance(record[key], list):
            raise BadConversation(f"`{key}` is {type(record[key]).__name__}, not a list")
        said = {"messages": [*before, *record[key]], "tools": record.get("tools")}
        tools = conversation_of(said, Shape.messages)
        whole[key] = tools.pop("messages")
    shared = _shared(*whole.values()) if not before else len(before)
    for key in ANSWERS:
        if len(whole[key]) == shared or whole[key][shared]["role"] != "assistant":
            raise BadConversation(f"no message of the assistant begins the {key} answer")
    answers = {key: messages[shared:] for key, messages in whole.items()}
    return {"prompt": whole["chosen"][:shared], **answers, **tools}


def _shared(first: list[Any], second: list[Any]) -> int:
    """Return the number of messages in the prompt that two conversations share.

    It ends before a message of the assistant, so that each answer has at least one message.
    """
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    while count and (count == min(len(first), len(second)) or first[count]["role"] != "assistant"):
        count -= 1
    return count
