"""Imports of hostile or odd files: a result or an error of trainctl's, never another exception."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from trainctl.errors import TrainctlError
from trainctl.migration.configs.import_file import import_file
from trainctl.migration.configs.import_table import import_document
from trainctl.migration.configs.launch_script import read_launch_script
from trainctl.migration.configs.pickled import PlainValues
from trainctl.migration.configs.shell import Unresolved
from trainctl.migration.configs.tables import load_table, tool_names

START = {
    "accelerate": {"distributed_type": "DEEPSPEED"},
    "axolotl": {"base_model": "a/b"},
    "gpt_neox": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2},
    "llama_factory": {"stage": "sft"},
    "llama_factory_v1": {"train_dataset": "a.jsonl"},
    "openrlhf": {"openrlhf": "train_dpo"},
    "torchtitan": {"model": {"name": "llama3", "flavor": "8B"}},
    "training_arguments": {"learning_rate": 1e-4},
    "trl": {"model_name_or_path": "a/b"},
}


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (".inf", "learning_rate is inf"),
        (".nan", "learning_rate is nan"),
        (f"1{'0' * 30}", "learning_rate is beyond"),
        ("1e999", "learning_rate is inf"),
        ("!!binary aGVsbG8=", "learning_rate is bytes"),
        ("!!set {a}", ""),
        ('"\\ud800"', "invalid Unicode"),
        ('"a\\0b"', "holds what is no text"),
        ("!!timestamp 2026-01-01", ""),
        ("1" * 5000, ""),
        ("&a [*a]", ""),
        ("[" * 60 + "]" * 60, "nested deeper"),
        ("!!python/object/apply:os.system [id]", "could not determine a constructor"),
    ],
)
def test_a_value_that_no_key_has_is_refused_by_its_key(tmp_path, written, words):
    file = tmp_path / "a.yaml"
    file.write_text(f"model_name_or_path: a/b\nmax_steps: 4\nlearning_rate: {written}\n")
    if not words:
        outcome(file, "trl")
        return
    with pytest.raises(TrainctlError, match=words):
        import_file(file)


@pytest.mark.parametrize("path", ["~nobody-there/x", "x" * 5000, "/proc/1/root"])
def test_places_of_any_kind_are_texts(tmp_path, path):
    documents = {
        "trl": {"model_name_or_path": path, "dataset_name": path, "deepspeed": path}
        | {"chat_template_path": path, "eval_strategy": "steps", "max_steps": 4},
        "axolotl": {"base_model": path, "datasets": [{"path": path}], "deepspeed": path},
        "llama_factory": {"stage": "sft", "dataset": path, "dataset_dir": path},
        "llama_factory_v1": {"train_dataset": f"{path}.yaml"},
        "gpt_neox": START["gpt_neox"] | {"vocab_file": path, "data_path": path, "hostfile": path},
        "accelerate": {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {
                "deepspeed_config_file": path,
                "offload_optimizer_device": "nvme",
                "offload_optimizer_nvme_path": path,
            },
        },
    }
    for tool, document in documents.items():
        file = tmp_path / f"{tool}.json"
        file.write_text(json.dumps(document))
        assert import_file(file, tool=tool).overrides


def test_unreadable_files_are_named(tmp_path):
    for name, content in (
        ("a.yaml", b"\xff\xfe"),
        ("b.json", b'{"learning_rate": '),
        ("c.yaml", b"a: &a [1]\n" + b"".join(b"b%d: &a [*a, *a]\n" % n for n in range(40))),
        ("d.toml", b"a = \x00"),
        ("e.sh", b"\xff"),
    ):
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "f.yaml")
    (tmp_path / "g.yaml").mkdir()
    for file in sorted(tmp_path.iterdir()):
        with pytest.raises(TrainctlError, match=file.name):
            import_file(file, tool="trl")
    with pytest.raises(TrainctlError, match="none"):
        import_file(tmp_path / "none.yaml")


def outcome(file: Path, tool: str | None) -> None:
    """Import a file: its result can be printed, and an error is trainctl's."""
    try:
        found = import_file(file, tool=tool)
    except TrainctlError as error:
        str(error).encode()
        return
    "\n".join((*found.overrides, found.recipe, str(found.left_out))).encode()


PLAIN = st.one_of(
    st.sampled_from([None, True, False, 0, 1, 2, -1, 8, 0.5, -0.5, 1e308, 2**53]),
    st.sampled_from(["", "auto", "none", "no", "a", "a/b", "1e-4", "True", "a,b", "cpu", "lora"]),
    st.sampled_from(
        ["~nobody-there/x", "${a.b}", "=", "[", "{a: 1}", "../..", "\n", "?", "x" * 300]
    ),
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)
ODD = st.one_of(
    st.sampled_from([10**30, 10**400, float("inf"), float("nan"), b"a", "\ud800", "a\0b", "1e999"]),
    st.dates(),
    st.sets(st.integers(), max_size=2),
)


@st.composite
def documents(draw):
    """A program's keys with odd values, nested or dotted, and a few keys of none."""
    tool = draw(st.sampled_from(tool_names()))
    entries = load_table(tool).keys
    names = [name for name, each in entries.items() if each.convert or each.key]
    document = dict(START[tool]) if draw(st.booleans()) else {}
    named = draw(st.lists(st.sampled_from(names), max_size=12, unique=True))
    for number, name in enumerate(named):
        value = draw(VALUES if number else VALUES | ODD)
        known = [*entries[name].values] if entries[name].values else [entries[name].default]
        value = draw(st.sampled_from([*known, value]))
        parts = name.replace("*", draw(st.sampled_from(["a", "*", ""]))).split(".")
        place = document
        for part in parts[:-1] if draw(st.booleans()) else []:
            key, is_list = part.removesuffix("[]"), part.endswith("[]")
            inner = place.get(key)
            inner = inner if isinstance(inner, dict) else {}
            place[key] = [inner] if is_list else inner
            place = inner
        place[parts[-1]] = value
    return tool, document


def check_document(given) -> None:
    """Convert a document as one that was read; what is no plain document is refused before."""
    tool, document = given
    try:
        plain = PlainValues().value(document)
    except ValueError:
        return
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = import_document(load_table(tool), plain, folder=Path(folder))
    except TrainctlError as error:
        str(error).encode()
        return
    "\n".join((*found.overrides, found.recipe, str(found.left_out))).encode()


PARTS = [
    *("torchrun", "srun", "bash -c '", "python -m", "train.py", "accelerate launch", "deepspeed"),
    *("$A", "${A:-", "}", "$((", "))", "$(", "`", "${", "$", '"$@"', "A=", "A=(", "A+=", "{", ")"),
    *("'", '"', "\n", ";", "&&", "<<EOF", "EOF", "> x", "# ", "\\", "\\\n", "10**9", "x"),
    *("if x; then", "fi", "for A in", "done", "--a ", "--learning_rate=", "1e-4"),
    "--nproc_per_node",
]


SCRIPTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=14)


def check_script(words) -> None:
    """Read a script of any words."""
    try:
        found = read_launch_script(" ".join(words), "train.sh")
    except (TrainctlError, ValueError):
        return
    assert not any(isinstance(each, Unresolved) for each in found.settings.values())


@st.composite
def files(draw):
    """A file of any of the read formats, and perhaps the program that it is for."""
    tool = draw(st.sampled_from([None, *tool_names(), "deepspeed"]))
    kind = draw(st.sampled_from(["script", "document", "bytes"]))
    if kind == "script":
        text = draw(st.sampled_from([" ", ""])).join(draw(SCRIPTS))
        return "a.sh", text.encode("utf-8", "surrogatepass"), tool
    if kind == "bytes":
        name = draw(st.sampled_from(["a.yaml", "a.json", "a.toml", "a.bin", "a", "a.args"]))
        return name, draw(st.binary(max_size=40)), tool
    tool, document = draw(documents())
    tool = draw(st.sampled_from([None, tool]))
    if draw(st.booleans()):
        text = yaml.dump(document, allow_unicode=True)
        return "a.yaml", text.encode("utf-8", "surrogatepass"), tool
    text = json.dumps(document, default=str)
    return "a.json", text.encode("utf-8", "surrogatepass"), tool


def check_file(given) -> None:
    """Import a file of any content."""
    name, content, tool = given
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_bytes(content)
        outcome(file, tool)


QUICK = settings(max_examples=100, deadline=None, suppress_health_check=[*HealthCheck])
SLOW = settings(max_examples=2000, deadline=None, suppress_health_check=[*HealthCheck])


@QUICK
@given(documents())
@example(("trl", {"test_split_size": []}))
@example(("trl", {"beta": 0.1, "max_length": "1024"}))
@example(("trl", {"reward_funcs": "a", "loss_type": ["grpo", "dapo"]}))
@example(
    ("torchtitan", {"model_spec": {"name": "llama3", "model": {"layers": [{"feed_forward": 1}]}}})
)
def test_odd_documents_are_converted_or_refused(given):
    check_document(given)


@QUICK
@given(SCRIPTS)
def test_odd_scripts_are_read_or_refused(words):
    check_script(words)


@pytest.mark.slow
@SLOW
@given(SCRIPTS)
def test_many_odd_scripts_are_read_or_refused(words):
    """Slow: 2,000 scripts."""
    check_script(words)


@pytest.mark.slow
@SLOW
@given(documents())
def test_many_odd_documents_are_converted_or_refused(given):
    """Slow: 2,000 documents."""
    check_document(given)


@pytest.mark.slow
@QUICK
@given(files())
def test_odd_files_are_imported_or_refused(given):
    """Slow: each result is checked as a whole, which takes a third of a second."""
    check_file(given)
