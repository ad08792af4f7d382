"""Pairs of answers in records, and what is wrong with one."""

from __future__ import annotations

import pytest

from trainctl.readers.conversations import BadRecord, pair_of


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def test_texts_and_messages_are_pairs():
    texts = {"prompt": "1+1=", "chosen": "2", "rejected": "3", "score": 5}
    assert pair_of(texts) == {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    assert pair_of({**texts, "margin": 2})["margin"] == 2.0
    assert "margin" not in pair_of({**texts, "margin": None})
    expected = {"prompt": [user("a")], "chosen": [said("b")], "rejected": [said("c")]}
    apart = {"prompt": [user("a")], "chosen": [said("b")], "rejected": [said("c")]}
    whole = {"chosen": [user("a"), said("b")], "rejected": [user("a"), said("c")]}
    for record in (apart, whole, {**whole, "prompt": "a"}):
        assert pair_of(record) == expected
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert pair_of({**apart, "tools": tools})["tools"] == tools


def test_whole_conversations_share_what_both_begin_with():
    start = [user("a"), said("b"), user("c")]
    longer = {"chosen": [*start, said("d"), user("e"), said("f")], "rejected": [*start, said("d")]}
    found = pair_of(longer)
    assert found["prompt"] == start
    assert [len(found["chosen"]), len(found["rejected"])] == [3, 1]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ([], "not an object"),
        ({"prompt": "a", "chosen": "b"}, "no 'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "the rejected answer is empty"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "not an empty one"),
        ({"chosen": "b", "rejected": "c"}, "need a `prompt`"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "2"}, "`margin` is '2', not a"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1e39}, "not a number"),
        ({"prompt": [user("a")], "chosen": "b", "rejected": [said("c")]}, "`chosen` is str"),
        (
            {
                "prompt": [user("a"), said("b")],
                "chosen": [user("c"), said("d")],
                "rejected": [user("c"), said("e")],
            },
            "no message of the assistant begins the chosen",
        ),
        ({"prompt": [user("a")], "chosen": [user("b")], "rejected": [said("c")]}, "out of order"),
        ({"chosen": [user("a"), said("")], "rejected": [user("a"), said("c")]}, "is empty"),
    ],
)
def test_invalid_pairs_are_refused_with_the_reason(record, why):
    with pytest.raises(BadRecord, match=why):
        pair_of(record)
