"""Conversations and preference pairs in records of the published shapes, and their problems.

| shape | a record has |
|---|---|
| `messages` | `messages`: a list of `role`, `content`, and `tool_calls` where tools are called |
| `prompt` | `prompt` and `completion`: texts, or lists of messages |
| `alpaca` | `instruction` and `output`, perhaps `input`, `system` and `history` |
| `sharegpt` | `conversations`: a list of `from` and `value`, perhaps `system` |
| pair of texts | `prompt`, `chosen`, `rejected`: the answers continue the prompt |
| pair of messages | `prompt`, which ends with the user's message, `chosen`, `rejected` |
| pair of conversations | `chosen` and `rejected`, whose common beginning is the prompt |

A list of objects may also be an object of lists, as `datasets` stores a `Sequence` of objects. A
record of any shape may have `tools`: a list of JSON schemas, or that list as JSON. All shapes of
conversations are converted to ``{"messages": [...], "tools": [...]}``, and pairs to the prompt and
the two answers, with the `margin` if the record has one: how much better the chosen answer is. This
JSON is the text of the document.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any

Message = dict[str, Any]
Record = Mapping[str, Any]

_SYSTEM = ("system", "developer")
_ROLES = (*_SYSTEM, "user", "assistant", "tool")
_MAY_FOLLOW = {
    "": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
"""Roles that may follow a role; the empty role stands for the start of the conversation."""
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}


LEARN_KEYS = ("weight", "train", "loss")
"""Keys of OpenAI's, Axolotl's and other files that say whether an answer is learned."""


class Shape(Enum):
    """Layout of a conversation in a record."""

    auto = "auto"
    messages = "messages"
    prompt = "prompt"
    alpaca = "alpaca"
    sharegpt = "sharegpt"


class Learn(Enum):
    """Messages of a conversation whose tokens have a loss."""

    assistant = "assistant"
    last = "last"
    all = "all"


class BadRecord(ValueError):
    """A record that has not what its source takes; the message says why."""


_OF_MESSAGES = ("role", "content", "tool_calls", "from", "value")
_LISTS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
_OF_RECORDS = ("instruction", "input", "output", "system", "history", "tools", "margin", "label")
_OTHERS = ("completions", "labels", "query", "positive", "negative")
NAMES = frozenset((*_OF_MESSAGES, *_LISTS, *_OF_RECORDS, *_OTHERS))
"""Names that records are read by."""


def renamed(record: Any, columns: Mapping[str, str]) -> Any:
    """Return a record under the names that it is read by.

    Args:
        columns: The record's own keys by these names; those of a message are renamed in lists.
    """
    if not columns or not isinstance(record, Mapping):
        return record
    found = _rename(record, columns)
    of_messages = {name: columns[name] for name in _OF_MESSAGES if name in columns}
    for key in _LISTS if of_messages else ():
        if isinstance(found.get(key), list):
            found[key] = [
                _rename(each, of_messages) if isinstance(each, Mapping) else each
                for each in found[key]
            ]
    return found


def _rename(record: Record, columns: Mapping[str, str]) -> dict[str, Any]:
    taken = {*columns.values()}
    kept = {key: value for key, value in record.items() if key not in taken}
    return kept | {name: record[key] for name, key in columns.items() if key in record}


def conversation_of(
    record: object, shape: Shape = Shape.auto, learn_key: str | None = None
) -> dict[str, Any]:
    """Return the conversation of a record: `messages`, and `tools` where there are any.

    Args:
        shape: Layout of the record; `auto` is detected by its keys.
        learn_key: Key of the assistant's messages that says whether one is learned; messages
            without it are. `learned` of the conversation then has their numbers, from 0. None
            takes the first of `LEARN_KEYS` that keeps a message from being learned; an empty key
            takes none.

    Raises:
        BadRecord: It has no such shape, is empty, has roles out of order, a message without
            text, or no answer to learn.
    """
    if not isinstance(record, Mapping):
        raise BadRecord("not an object with a conversation in it")
    shape = _shape_of(record, shape)
    kept = LEARN_KEYS if learn_key is None else (learn_key,)
    read = partial(_read_sharegpt, kept=kept) if shape is Shape.sharegpt else _READERS[shape]
    messages = [_read_message(each) for each in read(record)]
    _require_order(messages)
    key = _find_learn_key(messages) if learn_key is None else learn_key
    learned = {"learned": _learned(messages, key)} if key else {}
    tools = _read_tools(record)
    return {"messages": messages, **({"tools": tools} if tools else {}), **learned}


def _find_learn_key(messages: list[Message]) -> str:
    """Return the first of `LEARN_KEYS` by which an answer is not learned; empty without one.

    A number counts as `weight` alone: a `loss` of 0.0 may be a measured one.
    """
    answers = [message for message in messages if message["role"] == "assistant"]
    return next(
        (
            key
            for key in LEARN_KEYS
            for each in answers
            if each.get(key) is False or (key == "weight" and each.get(key) == 0)
        ),
        "",
    )


def _read_tools(record: Record) -> list[dict[str, Any]] | None:
    tools = record.get("tools")
    if isinstance(tools, str):
        tools = _parse_json(tools) if tools.strip() else None
    if tools and not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
        raise BadRecord("`tools` is no list of JSON schemas")
    return tools


def as_text(conversation: Mapping[str, Any]) -> str:
    """Return a conversation as a document's text, identical for equal conversations.

    Values that JSON has no type for, such as a date in another column, are written as strings.
    """
    return json.dumps(conversation, ensure_ascii=False, separators=(",", ":"), default=str)


def _shape_of(record: Record, shape: Shape) -> Shape:
    if shape is not Shape.auto:
        missing = [key for key in _KEYS[shape] if key not in record]
        if missing:
            raise BadRecord(f"no {missing[0]!r}, which data.shape={shape.value} has")
        return shape
    for each, keys in _KEYS.items():
        if all(record.get(key) is not None for key in keys):
            return each
    has = ", ".join(map(repr, list(record)[:8])) or "nothing"
    known = "; ".join(f"{each.value} ({', '.join(keys)})" for each, keys in _KEYS.items())
    raise BadRecord(f"it has {has}: of no shape that is known, which are {known}")


def _read_messages(record: Record) -> list[Any]:
    return _parse_list(record["messages"], "messages")


def _read_prompt(record: Record) -> list[Any]:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    return [*_parse_list(prompt, "prompt"), *_parse_list(completion, "completion")]


def _read_alpaca(record: Record) -> list[Any]:
    system, extra_input = record.get("system"), record.get("input")
    instruction = record["instruction"]
    if extra_input:
        if not isinstance(instruction, str) or not isinstance(extra_input, str):
            raise BadRecord("`instruction` and `input` are not both texts")
        instruction = f"{instruction}\n\n{extra_input}"
    turns = [*_parse_list(record.get("history") or [], "history"), (instruction, record["output"])]
    messages = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise BadRecord("`history` is no list of pairs")
        messages += [
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
    return messages


def _read_sharegpt(record: Record, kept: Sequence[str] = ()) -> list[Any]:
    """Return the turns as messages. Of the other keys of a turn, only those of `kept` are."""
    system = record.get("system")
    messages = [{"role": "system", "content": system}] if system else []
    for each in _parse_list(record["conversations"], "conversations"):
        if isinstance(each, Mapping) and "role" in each:  # keys of `messages`
            messages.append(dict(each))
            continue
        who = each.get("from") if isinstance(each, Mapping) else None
        if not isinstance(who, str) or who not in _SHAREGPT_ROLES:
            raise BadRecord(f"a turn is from {who!r}, which is nobody that is known")
        own = {key: each[key] for key in kept if key in each}
        messages.append({"role": _SHAREGPT_ROLES[who], "content": each.get("value"), **own})
    return messages


_KEYS = {
    Shape.messages: ("messages",),
    Shape.sharegpt: ("conversations",),
    Shape.prompt: ("prompt", "completion"),
    Shape.alpaca: ("instruction", "output"),
}
_READERS: dict[Shape, Callable[[Record], list[Any]]] = {
    Shape.messages: _read_messages,
    Shape.sharegpt: _read_sharegpt,
    Shape.prompt: _read_prompt,
    Shape.alpaca: _read_alpaca,
}


def _read_message(record: object) -> Message:
    """Return a message without nulls, with its text parts joined."""
    if not isinstance(record, Mapping):
        raise BadRecord(f"a message is {type(record).__name__}, not an object")
    message = {key: value for key, value in record.items() if value is not None}
    role, content = message.get("role"), message.get("content")
    if isinstance(role, str) and role in _SHAREGPT_ROLES:
        role = message["role"] = _SHAREGPT_ROLES[role]
    if role not in _ROLES:
        raise BadRecord(f"a message has the role {role!r}, not one of {', '.join(_ROLES)}")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            raise BadRecord(f"a message of the {role} has parts that are no text")
        content = message["content"] = "".join(str(part.get("text") or "") for part in content)
    if content is not None and not isinstance(content, str):
        raise BadRecord(f"the content of the {role} is {type(content).__name__}, not text")
    if not content and not message.get("tool_calls"):
        raise BadRecord(f"a message of the {role} is empty")
    if message.get("tool_calls"):
        calls = _parse_list(message["tool_calls"], "tool_calls")
        message["tool_calls"] = [_decode_arguments(call) for call in calls]
    return message


def _decode_arguments(call: Any) -> Any:
    """Return a tool call with its arguments as an object if they are the JSON text of one."""
    if not isinstance(call, Mapping):
        return call
    if "function" in call:
        return {**call, "function": _decode_arguments(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def _require_order(messages: list[Message]) -> None:
    roles = [message["role"] for message in messages]
    if not roles:
        raise BadRecord("the conversation is empty")
    before = ""
    for number, role in enumerate(roles, 1):
        if number == 1 and role in _SYSTEM:
            continue
        if role not in _MAY_FOLLOW[before]:
            after = f"after one of the {before}" if before else "first"
            raise BadRecord(f"roles out of order: message {number:,} is one of the {role}, {after}")
        before = role
    if "assistant" not in roles:
        raise BadRecord("nothing to learn: no message is the assistant's")


def _learned(messages: list[Message], key: str) -> list[int]:
    """Return the numbers of the messages to learn, and remove the key from all messages.

    Raises:
        BadRecord: A value is neither 0 (false) nor 1 (true), or there is nothing to learn.
    """
    found = []
    for number, message in enumerate(messages):
        value, is_answer = message.pop(key, None), message["role"] == "assistant"
        if value is not None and (not isinstance(value, bool | int | float) or value not in (0, 1)):
            raise BadRecord(
                f"`{key}` of message {number + 1:,} is {value!r:.60}, not 0 or 1, false or true"
            )
        if value and not is_answer:
            raise BadRecord(
                f"`{key}` of message {number + 1:,} is {value!r}, and it is one of the "
                f"{message['role']}: only the assistant's are learned"
            )
        if is_answer and (value is None or value):
            found.append(number)
    if not found:
        raise BadRecord(
            f"nothing to learn: `{key}` is 0 or false in all of the assistant's messages"
        )
    return found


def _parse_list(value: object, key: str) -> list[Any]:
    if isinstance(value, str):  # a list stored as JSON in a text column
        value = _parse_json(value)
    if isinstance(value, Mapping):  # `datasets` stores a list of objects as an object of lists
        columns = [each for each in value.values() if isinstance(each, list)]
        if not columns or len(columns) < len(value) or len({len(each) for each in columns}) > 1:
            raise BadRecord(f"`{key}` is an object, and not of lists of one length")
        return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]
    if not isinstance(value, list):
        raise BadRecord(f"`{key}` is {type(value).__name__}, not a list")
    return value


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadRecord(f"{text!r:.60} is no JSON") from None


ANSWERS = ("chosen", "rejected")
_MOST = 3.4e38
"""Largest number that fp32 has."""


def pair_of(record: object) -> dict[str, Any]:
    """Return the pair of a record: `prompt`, `chosen`, `rejected`, and `tools` and `margin` where
    there are any.

    The first three are either texts or lists of messages.

    Raises:
        BadRecord: It has no such shape, an answer is empty, both answers are equal, or a
            conversation is malformed.
    """
    if not isinstance(record, Mapping):
        raise BadRecord("not an object with a pair of answers in it")
    missing = [key for key in ANSWERS if record.get(key) is None]
    if missing:
        has = ", ".join(map(repr, list(record)[:8])) or "nothing"
        raise BadRecord(
            f"it has {has}, and no {missing[0]!r}: a pair has prompt, chosen, rejected; or chosen "
            "and rejected as lists of messages that begin alike"
        )
    are_texts = isinstance(record["chosen"], str) and isinstance(record["rejected"], str)
    pair = _pair_of_texts(record) if are_texts else _pair_of_messages(record)
    if pair["chosen"] == pair["rejected"]:
        raise BadRecord("the chosen and the rejected answer are the same")
    margin = record.get("margin")
    return {**pair, **({} if margin is None else {"margin": number_of(margin, "margin")})}


def prompt_of(record: object, key: str = "prompt") -> dict[str, Any]:
    """Return the prompt of a record: `prompt`, `tools` where there are any, and `columns`, which
    has all other keys.

    The prompt is a text, or a list of messages that the assistant is to answer.

    Raises:
        BadRecord: There is no such key, the prompt is empty, its roles are out of order, or more
            than one answer is to be generated.
    """
    if not isinstance(record, Mapping) or record.get(key) is None:
        has = ", ".join(map(repr, list(record)[:8])) if isinstance(record, Mapping) else "no object"
        raise BadRecord(f"it has {has or 'nothing'}, and no {key!r}")
    prompt, columns = record[key], {name: each for name, each in record.items() if name != key}
    if isinstance(prompt, str) and prompt:
        return {"prompt": prompt, "columns": columns}
    if not prompt:
        raise BadRecord("the prompt is empty")
    messages = _parse_list(prompt, key)
    if any(not _has_content(each) for each in messages) or messages[-1].get("role") == "assistant":
        raise BadRecord(
            "an answer before the end is to be generated, or none: a prompt ends with a message of "
            "the user or a tool, and one answer to it is sampled (no multi-turn rollouts)"
        )
    messages = [_read_message(each) for each in messages]
    _require_order([*messages, {"role": "assistant"}])
    tools = _read_tools(record)
    columns.pop("tools", None)
    return {"prompt": messages, **({"tools": tools} if tools else {}), "columns": columns}


def _has_content(message: object) -> bool:
    """Return False for a message of the assistant that has neither text nor calls."""
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        return isinstance(message, Mapping)
    return bool(message.get("content") or message.get("tool_calls"))


def number_of(value: object, key: str) -> float:
    """Return a number or a truth value of a record as a number.

    Raises:
        BadRecord: It is something else, or no number that fp32 has.
    """
    if not isinstance(value, bool | int | float) or not abs(value) <= _MOST:
        raise BadRecord(f"`{key}` is {value!r:.60}, not a number")
    return float(value)


def _pair_of_texts(record: Mapping[str, Any]) -> dict[str, Any]:
    prompt = record.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise BadRecord("two texts need a `prompt` that is a text, and not an empty one")
    for key in ANSWERS:
        if not record[key]:
            raise BadRecord(f"the {key} answer is empty")
    return {key: record[key] for key in ("prompt", *ANSWERS)}


def _pair_of_messages(record: Mapping[str, Any]) -> dict[str, Any]:
    prompt = record.get("prompt")
    before = list(prompt) if isinstance(prompt, list) else []
    whole, tools = {}, {}
    for key in ANSWERS:
        if not isinstance(record[key], list):
            raise BadRecord(f"`{key}` is {type(record[key]).__name__}, not a list")
        conversation = {"messages": [*before, *record[key]], "tools": record.get("tools")}
        tools = conversation_of(conversation, Shape.messages, learn_key="")
        whole[key] = tools.pop("messages")
    shared = _shared_message_count(*whole.values()) if not before else len(before)
    for key in ANSWERS:
        if len(whole[key]) == shared or whole[key][shared]["role"] != "assistant":
            raise BadRecord(f"no message of the assistant begins the {key} answer")
    answers = {key: messages[shared:] for key, messages in whole.items()}
    return {"prompt": whole["chosen"][:shared], **answers, **tools}


def _shared_message_count(first: list[Any], second: list[Any]) -> int:
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
