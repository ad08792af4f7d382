"""Records of one sample each: answers with a label, labelled texts, steps, similar texts.

| a record of | has |
|---|---|
| `answers` | `prompt`, `completion`, `label` (TRL's unpaired preferences); `messages`, `label` |
| `labelled` | a text, perhaps a second one, and a label: class, list of classes, number, numbers |
| `steps` | `prompt`, `completions`, `labels` (TRL's stepwise supervision) |
| `similar` | a query, a positive and any number of negatives, under any of the names below |

Preference pairs are in `readers.conversations`, whose shapes of messages the answers have too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainctl.readers.conversations import BadRecord, Shape, conversation_of, number_of

Record = Mapping[str, Any]

_QUERIES = ("query", "anchor", "question", "sentence1", "sentence_A", "premise")
_POSITIVES = ("positive", "pos", "answer", "sentence2", "sentence_B", "entailment")
_NEGATIVES = ("negative", "negatives", "neg", "contradiction")
"""Column names of sentence-transformers' data sets, and of FlagEmbedding's (`pos`, `neg`)."""
_STRIPPED = str.maketrans("", "", "0123456789")


def answer_of(record: object) -> dict[str, Any]:
    """Return the answer of a record: `prompt`, `completion`, `label`, and `tools` if there are any.

    Prompt and completion are either texts or lists of messages.

    Raises:
        BadRecord: It has no such shape, the answer is empty, or the label is neither true nor
            false.
    """
    record = _object(record)
    label = record.get("label")
    if not isinstance(label, bool | int) or label not in (0, 1):
        raise BadRecord(f"`label` is {label!r:.60}, not true or false")
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        if not prompt or not completion:
            raise BadRecord(f"the {'completion' if prompt else 'prompt'} is empty")
        return {"prompt": prompt, "completion": completion, "label": bool(label)}
    if record.get("messages") is None:
        if not isinstance(prompt, list) or not isinstance(completion, list):
            raise BadRecord("`prompt` and `completion` are not two texts or two lists of messages")
        record = {**record, "messages": [*prompt, *completion]}
    conversation = conversation_of(record, Shape.messages, learn_key="")
    messages = conversation.pop("messages")
    before = len(prompt) if isinstance(prompt, list) else len(messages) - 1
    if before >= len(messages) or messages[before]["role"] != "assistant":
        raise BadRecord("no message of the assistant begins the completion")
    parts = {"prompt": messages[:before], "completion": messages[before:]}
    return {**parts, "label": bool(label), **conversation}


def labelled_of(
    record: object,
    text_key: str,
    pair_key: str | None,
    label_key: str,
    classes: Sequence[str],
) -> dict[str, Any]:
    """Return the `texts` of a record, one or two, and its `label`, a list of names or numbers.

    Args:
        classes: Names that a label may have; empty allows any.

    Raises:
        BadRecord: A text is missing or empty, or a label is none.
    """
    record = _object(record)
    keys = [text_key, *([pair_key] if pair_key else [])]
    value = record.get(label_key)
    if value is None:
        raise BadRecord(f"no label in {label_key!r} (data.label_key)")
    label = [_label(each, label_key, classes) for each in (value if _is_list(value) else [value])]
    if len({type(each) for each in label}) > 1:
        raise BadRecord(f"`{label_key}` has names and numbers")
    return {"texts": [_text(record, key) for key in keys], "label": label}


def steps_of(record: object) -> dict[str, Any]:
    """Return the steps of a record: `prompt`, `completions` and `labels`, one for each step.

    Raises:
        BadRecord: A text is missing or empty, or there is another number of labels than of steps.
    """
    record = _object(record)
    steps, labels = record.get("completions"), record.get("labels")
    for key, value in (("completions", steps), ("labels", labels)):
        if not isinstance(value, list) or not value:
            raise BadRecord(f"`{key}` is {value!r:.60}, not a list with an entry for each step")
    assert steps is not None and labels is not None
    if len(labels) != len(steps):
        raise BadRecord(f"`labels` has {len(labels)} entries, and there are {len(steps)} steps")
    for step in steps:
        if not isinstance(step, str) or not step:
            raise BadRecord(f"a step is {step!r:.60}, not a text")
    numbers = [number_of(each, "labels") for each in labels]
    return {"prompt": _text(record, "prompt"), "completions": list(steps), "labels": numbers}


def similar_of(record: object) -> dict[str, Any]:
    """Return the `texts` of a record: the query, the positive, and the negatives.

    Raises:
        BadRecord: One is missing or empty, or there are several positives.
    """
    record = _object(record)
    query = _text(record, _first_present(record, _QUERIES))
    positive = _first_present(record, _POSITIVES)
    found = record[positive]
    if _is_list(found) and len(found) == 1:
        found = found[0]
    if not isinstance(found, str) or not found:
        raise BadRecord(f"`{positive}` is {found!r:.60}, not one text: write a record for each")
    negatives: list[Any] = []
    for key, value in record.items():
        if key.translate(_STRIPPED).rstrip("_") in _NEGATIVES and value is not None:
            negatives += value if _is_list(value) else [value]
    for negative in negatives:
        if not isinstance(negative, str) or not negative:
            raise BadRecord(f"a negative is {negative!r:.60}, not a text")
    return {"texts": [query, found, *negatives]}


def _object(record: object) -> Record:
    if not isinstance(record, Mapping):
        raise BadRecord(f"it is {type(record).__name__}, not an object")
    return record


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _text(record: Record, key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value:
        has = ", ".join(map(repr, list(record)[:8])) or "nothing"
        why = f"no {key!r}: it has {has}" if value is None else f"`{key}` is {value!r:.60}, no text"
        raise BadRecord(why)
    return value


def _first_present(record: Record, names: Sequence[str]) -> str:
    """Return the first of the names that the record has a value of."""
    for name in names:
        if record.get(name) is not None:
            return name
    has = ", ".join(map(repr, list(record)[:8])) or "nothing"
    raise BadRecord(f"it has {has}, and none of {', '.join(names)}")


def _label(value: object, key: str, classes: Sequence[str]) -> float | str:
    if isinstance(value, str):
        if classes and value not in classes:
            raise BadRecord(f"`{key}` is {value!r:.60}, none of data.classes")
        return value
    if classes:
        raise BadRecord(f"`{key}` is {value!r:.60}, and data.classes are names")
    return number_of(value, key)
