"""Records of one sample each, and what is wrong with one."""

from __future__ import annotations

from functools import partial

import pytest

from trainctl.readers.conversations import BadRecord
from trainctl.readers.records import answer_of, labelled_of, similar_of, steps_of


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


named = partial(labelled_of, text_key="text", pair_key=None, label_key="label", classes=())


def test_answers_are_texts_or_messages():
    texts = {"prompt": "1+1=", "completion": "2", "label": True, "score": 3}
    assert answer_of(texts) == {"prompt": "1+1=", "completion": "2", "label": True}
    expected = {"prompt": [user("a")], "completion": [said("b")], "label": False}
    assert answer_of({"prompt": [user("a")], "completion": [said("b")], "label": 0}) == expected
    assert answer_of({"messages": [user("a"), said("b")], "label": False}) == expected


def test_labels_are_names_numbers_or_lists_of_them():
    assert named({"text": "a", "label": "spam"}) == {"texts": ["a"], "label": ["spam"]}
    assert named({"text": "a", "label": 2})["label"] == [2.0]
    assert named({"text": "a", "label": True})["label"] == [1.0]
    assert named({"text": "a", "label": ["x", "y"]})["label"] == ["x", "y"]
    assert named({"text": "a", "label": []})["label"] == []
    pair = {"premise": "a", "hypothesis": "b", "gold": 0.5}
    found = labelled_of(pair, "premise", "hypothesis", "gold", ())
    assert found == {"texts": ["a", "b"], "label": [0.5]}


def test_similar_texts_have_the_names_of_several_libraries():
    expected = {"texts": ["q", "p", "n", "m"]}
    for record in (
        {"query": "q", "pos": ["p"], "neg": ["n", "m"]},
        {"anchor": "q", "positive": "p", "negative_1": "n", "negative_2": "m"},
        {"sentence1": "q", "sentence2": "p", "negatives": ["n", "m"]},
    ):
        assert similar_of(record) == expected
    assert similar_of({"question": "q", "answer": "p", "score": 1}) == {"texts": ["q", "p"]}


def test_steps_have_a_label_each():
    record = {"prompt": "1+1+1", "completions": ["2", "4"], "labels": [True, False]}
    assert steps_of(record) == {**record, "labels": [1.0, 0.0]}


@pytest.mark.parametrize(
    ("read", "record", "why"),
    [
        (answer_of, 3, "it is int, not an object"),
        (answer_of, {"prompt": "a", "completion": "b"}, "`label` is None, not true or false"),
        (answer_of, {"prompt": "a", "completion": "b", "label": "good"}, "`label` is 'good'"),
        (answer_of, {"prompt": "a", "completion": "b", "label": 2}, "`label` is 2"),
        (answer_of, {"prompt": "a", "completion": "", "label": 1}, "the completion is empty"),
        (answer_of, {"prompt": "a", "completion": [said("b")], "label": 1}, "are not two texts"),
        (answer_of, {"messages": [user("a")], "label": 1}, "no message is the assistant's"),
        (
            answer_of,
            {"prompt": [user("a"), said("b")], "completion": [user("c"), said("d")], "label": 1},
            "no message of the assistant begins",
        ),
        (named, {"text": "a"}, r"no label in 'label' \(data\.label_key\)"),
        (named, {"label": 1}, "no 'text': it has 'label'"),
        (named, {"text": "", "label": 1}, "`text` is '', no text"),
        (named, {"text": "a", "label": ["x", 1]}, "has names and numbers"),
        (named, {"text": "a", "label": float("nan")}, "`label` is nan, not a number"),
        (partial(named, classes=["x"]), {"text": "a", "label": "y"}, r"none of data\.classes"),
        (partial(named, classes=["x"]), {"text": "a", "label": 0}, "are names"),
        (steps_of, {"prompt": "a", "completions": [], "labels": []}, "`completions` is"),
        (steps_of, {"prompt": "a", "completions": ["b"], "labels": [1, 0]}, "has 2 entries"),
        (steps_of, {"prompt": "a", "completions": [""], "labels": [1]}, "a step is '', not a text"),
        (similar_of, {"text": "a"}, "it has 'text', and none of query, anchor"),
        (similar_of, {"query": "a", "pos": ["b", "c"]}, "write a record for each"),
        (similar_of, {"query": "a", "pos": "b", "neg": [1]}, "a negative is 1, not a text"),
    ],
)
def test_invalid_records_are_refused_with_the_reason(read, record, why):
    with pytest.raises(BadRecord, match=why):
        read(record)
