"""Configurations of other trainers, converted by tables: each kind of entry, and detection."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from trainctl import api
from trainctl.config.catalog import list_options
from trainctl.config.compose import compose_leniently
from trainctl.config.schema import GROUPS
from trainctl.errors import TrainctlError
from trainctl.migration.configs import tables
from trainctl.migration.configs.import_table import converter, flatten, import_document
from trainctl.migration.configs.result import Why
from trainctl.migration.configs.tables import (
    KeyTable,
    detect,
    load_table,
    parse_entry,
    tool_names,
    without_indices,
)


def table(keys, **settings):
    return KeyTable(
        tool="a_tool",
        name="A tool",
        source="nowhere",
        looks_like=[["a"]],
        unlike=settings.get("unlike", []),
        always=settings.get("always", {}),
        shown=[],
        keys={name: parse_entry(entry) for name, entry in keys.items()},
    )


def imported(keys, document, **settings):
    return import_document(table(keys, **settings), document, folder=Path())


def left(result):
    return {each.key: each for each in result.left_out}


def test_each_kind_of_entry():
    keys = {
        "lr": "optimizer.lr",
        "decay": {"key": "optimizer.weight_decay", "default": 0.0},
        "beta": {"key": "optimizer.beta2", "default": 0.999},
        "optim": {
            "key": "optimizer",
            "values": {
                "adam": "adamw",
                "rare": {"left": "no kernel", "nearest": "optimizer=adamw"},
            },
            "default": "adam",
        },
        "noise": {"left": "none is there", "nearest": "gradients.noise=1"},
        "dir": {"ignored": "runs have their own"},
        "rate": {"same_as": "lr"},
        "part.*": {"left": "another technique"},
        "data[].path": {"ignored": "of the test"},
    }
    document = {
        "rate": 1e-5,
        "decay": None,
        "optim": "rare",
        "noise": 5,
        "dir": "out",
        "part": {"x": 1, "y": {"z": 0}},
        "data": [{"path": "a"}, {"path": "b", "type": "c"}],
        "typo": 1,
    }
    result = imported(keys, document, always={"model": "hf"})
    assert result.choices == {"model": "hf"}
    assert result.settings == {
        "optimizer.lr": 1e-5,
        "optimizer.weight_decay": 0.0,
        "optimizer.beta2": 0.999,
    }
    assert result.carried == ("rate",)
    found = left(result)
    assert (found["optim"].reason, found["optim"].nearest) == ("no kernel", "optimizer=adamw")
    assert found["noise"].why is Why.left and found["noise"].nearest == "gradients.noise=1"
    assert {key for key, each in found.items() if each.why is Why.ignored} == {
        "decay",
        "dir",
        "part.y.z",
        "data[0].path",
        "data[1].path",
    }
    assert {key for key, each in found.items() if each.why is Why.unknown} == {
        "typo",
        "data[1].type",
    }
    unsaid = imported(keys, {"lr": 1})
    assert unsaid.choices == {"optimizer": "adamw"}
    assert unsaid.overrides[:2] == ["optimizer=adamw", "optimizer.lr=1"]


def test_a_key_that_the_chosen_option_lacks_is_left_out():
    keys = {
        "optim": {"key": "optimizer", "values": {"sgd": "sgd"}},
        "beta": "optimizer.beta1",
        "eps": {"key": "optimizer.epsilon", "default": 1e-8},
    }
    result = imported(keys, {"optim": "sgd", "beta": 0.9})
    assert result.settings == {} and result.carried == ("optim",)
    assert [(each.key, each.reason) for each in result.left_out] == [
        ("beta", "optimizer=sgd has no optimizer.beta1")
    ]


def test_a_value_that_nothing_is_for_names_those_that_are():
    result = imported({"a": {"key": "precision", "values": {"half": "fp16"}}}, {"a": "tf32"})
    assert left(result)["a"].nearest == "half"


def write(tmp_path, text, name="theirs.yaml"):
    file = tmp_path / name
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("colour: red\nshape: round\n", "a.yaml", ["no program that is known", "colour, shape"]),
        ("- 1\n", "a.yaml", ["no mapping"]),
        ("a: [1\n", "a.yaml", ["cannot be read"]),
        ("a = \n", "a.toml", ["cannot be read"]),
        ("a: &a {b: *a}\n", "a.yaml", ["cannot be read"]),
    ],
)
def test_a_file_that_cannot_be_imported(tmp_path, text, name, words):
    with pytest.raises(TrainctlError) as raised:
        api.import_config(write(tmp_path, text, name))
    assert all(word in raised.value.message for word in words)


def test_a_file_of_two_programs_and_a_program_that_is_none(monkeypatch):
    monkeypatch.setattr(tables, "tool_names", lambda: ("training_arguments",) * 2)
    monkeypatch.setattr(KeyTable, "matches", lambda self, keys: True)
    with pytest.raises(TrainctlError, match=r"may be of \w+ or \w+: it has x") as raised:
        detect({"x": 1}, {"x"}, file="f")
    assert raised.value.hint.startswith("--from ")
    with pytest.raises(TrainctlError, match="no import from") as raised:
        load_table("training_argument")
    assert raised.value.hint == "did you mean training_arguments?"


@pytest.mark.parametrize("tool", tool_names())
def test_every_target_of_a_table_exists(tool):
    """Groups, keys and values that a table names compose, and so does every override of a hint."""
    found = load_table(tool)
    assert set(found.shown) <= found.keys.keys()
    for name, entry in found.keys.items():
        left = entry.left and not (entry.convert or entry.values)  # else a reason of some values
        meanings = (entry.key, entry.convert, left, entry.ignored, entry.same_as)
        assert sum(map(bool, meanings)) == 1, name
        assert not entry.same_as or entry.same_as in found.keys
        if entry.convert:
            assert callable(converter(entry.convert)) and entry.to, name
        assert all(target in GROUPS or exists(target) for target in entry.to), name
        for value in entry.values.values():
            if not isinstance(value, dict) and entry.key:
                assert_composes(f"{entry.key}={json.dumps(value)}")
        nearest = [
            entry.nearest,
            *(v.get("nearest", "") for v in entry.values.values() if isinstance(v, dict)),
        ]
        for override in filter(is_override, nearest):
            assert_composes(override)
        if entry.key and not entry.values:
            assert entry.key in GROUPS or exists(entry.key), (name, entry.key)


def is_override(text):
    return "=" in text and " " not in text and not text.startswith("-")


def exists(key):
    """Return True if some option of the key's group has it."""
    from trainctl.config.keys import leaves

    return key in leaves() or key.startswith(("logging.", "callbacks."))


@cache
def assert_composes(override):
    """Compose with options that have most keys, else with any of the group that has the key."""
    value = override.replace("=N", "=7").replace("=DIR", "=x").replace("=FILE", "=x")
    group = value.partition("=")[0].partition(".")[0]
    rich = [each for each in RICH if not value.startswith(f"{each.partition('=')[0]}=")]
    options = [option.name for option in list_options(group)] if group in GROUPS else []
    tries = [[*rich, value], *([f"{group}={option}", value] for option in options)]
    found = (compose_leniently(overrides).findings for overrides in tries)
    wrong = ([x.message for x in each if x.is_error and x.key != "model.path"] for each in found)
    assert any(not messages for messages in wrong), override


RICH = ("adapter=lora", "objective=dpo", "data=chat", "tokenizer=hf")


KEYS = {tool: sorted(load_table(tool).keys) for tool in tool_names()}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2000),
    st.floats(0, 1),
    st.sampled_from(["", "no", "auto", "cosine", "linear", "bf16", "lora", "steps", "epoch", "x"]),
    st.lists(st.sampled_from(["q_proj", "wandb"]), max_size=2),
)


@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.data())
def test_each_key_of_a_source_is_in_the_result_once(data):
    tool = data.draw(st.sampled_from(tool_names()))
    names = data.draw(st.lists(st.sampled_from(KEYS[tool]), max_size=12, unique=True))
    document: dict = {}
    for name in names:
        level = document
        *parents, last = name.replace(".*", ".x").split(".")
        for parent in parents:
            if parent.endswith("[]"):
                entries = level.setdefault(parent[:-2], [{}])
                level = entries[0] if isinstance(entries, list) and entries else {}
            else:
                below = level.setdefault(parent, {})
                level = below if isinstance(below, dict) else {}
        if isinstance(level, dict):
            level.setdefault(last.removesuffix("[]"), data.draw(VALUES))
    if data.draw(st.booleans()):
        document["no_such_key"] = 1
    used = load_table(tool)
    result = import_document(used, document, folder=Path())
    keys = [key for key, _ in flatten(document, used)]
    told = [*result.carried, *(each.key for each in result.left_out if each.why is not Why.default)]
    assert sorted(told) == sorted(keys)
    assert len(set(told)) == len(told)
    assert all(without_indices(key) for key in told)
