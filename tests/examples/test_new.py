"""Tests of `trainctl new`: what it writes works as it is, under any name."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from trainctl.cli.new import Kind
from trainctl.errors import TrainctlError
from trainctl.examples.parts import EXAMPLES, write_part
from trainctl.runs.records import read_events

GROUPS = {kind: "callbacks" if kind == "callback" else kind.value for kind in Kind}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


STOP = "training.stop_after_steps=2"
SMALL = (
    "training.sequence_length=64",
    "training.global_batch_size=4",
    "training.micro_batch_size=2",
    "training.evaluation_samples=2",
    "training.sample_tokens=0",
)


def launches(folder: Path) -> list[str]:
    """Write a part of every kind, and return the commands that launch each."""
    return [write_part(group, f"my_{group}", folder).commands[1] for group in GROUPS.values()]


def test_every_kind_has_its_example() -> None:
    assert {path.parent.name for path in EXAMPLES.glob("*/test_*.py")} == set(GROUPS.values())


def test_the_page_shows_every_example() -> None:
    page = (EXAMPLES.parents[1] / "docs" / "options.md").read_text()
    for path in [*EXAMPLES.glob("*/*.py"), *EXAMPLES.glob("*/*.yaml")]:
        if not path.name.startswith("test_") and path.parent.name != "callbacks":
            assert (
                f":::{{literalinclude}} ../trainctl/examples/{path.parent.name}/{path.name}\n"
                in page
            )


@pytest.mark.slow
def test_the_tests_that_it_writes_pass() -> None:
    launches(Path())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert f"{len(Kind)} passed" in done.stdout
    # A test that does not look at the code would pass with any.
    for path in [*Path("options").glob("*/*.py"), Path("my_model.py")]:
        path.write_text(path.read_text().replace("return", "raise ValueError; return"))
    Path("options/callbacks/my_callbacks.py").write_text("SPEC = 1\n")
    done = subprocess.run(command, capture_output=True, text=True)
    assert "passed" not in done.stdout, done.stdout


@pytest.mark.parametrize("name", ["option", "optimizer", "update", "a_b", "Spec", "data"])
def test_no_name_hides_what_the_code_imports(name: str) -> None:
    for group in GROUPS.values():
        for path in write_part(group, name, Path()).files:
            if path.suffix == ".yaml":
                assert yaml.safe_load(path.read_text()).get("kind", name) == name
                continue
            tree = ast.parse(path.read_text())
            bodies = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom | ast.Import)]
            imported = {alias.asname or alias.name for node in bodies for alias in node.names}
            kinds = ast.ClassDef | ast.FunctionDef
            defined = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
            assert not imported & defined
            classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
            camel = name.title().replace("_", "")
            assert group == "model" or all(node.name.startswith(camel) for node in classes)


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("adamw", "optimizer=adamw is trainctl's own", "my_adamw"),
        ("my-own", "'my-own' cannot be the name", "my_my_own"),
        ("class", "'class' cannot be the name", "my_class"),
        ("null", "'null' cannot be the name", "my_null"),
        ("_own", "'_own' cannot be the name", "my_own"),
        ("../own", "'../own' cannot be the name", "my_own"),
        ("größe", "'größe' cannot be the name", "my_gr_e"),
        ("", "'' cannot be the name", "my_optimizer"),
    ],
)
def test_a_name_that_cannot_be_used(name: str, message: str, hint: str) -> None:
    with pytest.raises(TrainctlError, match=message) as raised:
        write_part("optimizer", name, Path())
    assert hint in raised.value.hint
    assert not list(Path().rglob("*"))


def test_a_model_takes_no_name_that_hides_a_module() -> None:
    for name in ("torch", "json", "sys"):
        with pytest.raises(TrainctlError, match=f"a module of the name {name} is installed"):
            write_part("model", name, Path())
    command = write_part("model", "mine", Path("a folder")).commands[1]
    assert command == "cd 'a folder' && trainctl launch recipe=tiny model=mine training.steps=20"


def test_nothing_is_overwritten() -> None:
    file = Path("conf/optimizer/mine.yaml")
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(TrainctlError, match=r"mine\.yaml is there already"):
        write_part("optimizer", "mine", Path())
    assert file.read_text() == "mine" and not Path("options").exists()


def trainctl(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command, which has to succeed, in a process of its own: it loads the options."""
    done = subprocess.run(
        [sys.executable, "-m", "trainctl", *words],
        env={**os.environ, "COLUMNS": "200", **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (words, done.stdout + done.stderr)
    return done


def test_the_command_says_what_it_wrote_and_how_to_try_it() -> None:
    shown = trainctl("new", "optimizer", "mine", "--config-dir", "a folder")
    assert shown.stdout.splitlines() == [
        "python -m pytest 'a folder/tests/test_optimizer_mine.py'",
        "trainctl launch --trust-code --config-dir 'a folder' recipe=tiny optimizer=mine "
        "training.steps=20",
    ]
    values = Path("a folder/conf/optimizer/mine.yaml")
    assert f"wrote {values}\n" in shown.stderr
    comment = values.read_text().splitlines()[0]
    schema = values.parent / comment.removeprefix("# yaml-language-server: $schema=")
    validator = jsonschema.Draft202012Validator(yaml.safe_load(schema.read_text()))
    plain = yaml.safe_load(values.read_text())
    assert not list(validator.iter_errors(plain))
    assert list(validator.iter_errors({**plain, "smoothing": 2.0}))


def test_the_code_that_was_there_needs_trust_for_the_schemas() -> None:
    file = Path("options/schedule/bad.py")
    file.parent.mkdir(parents=True)
    file.write_text("open('ran', 'w')\n")
    left = trainctl("new", "optimizer", "mine").stderr
    assert f"{file.absolute()} is code" in left
    assert "left to: trainctl config schema --trust-code --config-dir . --write" in left
    assert not Path("ran").exists() and not Path(".trainctl").exists()
    broken = trainctl("new", "optimizer", "other", TRAINCTL_TRUST_CODE="1").stderr
    assert "bad.py cannot be used: AttributeError" in broken and "left to: trainctl" in broken
    assert Path("ran").exists()
    file.unlink()
    trainctl("new", "--trust-code", "optimizer", "third")
    assert Path(".trainctl/optimizer.schema.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
def test_the_commands_that_it_prints_train() -> None:
    for number, command in enumerate(launches(Path())):
        trainctl(*shlex.split(command)[1:], "--run-dir", f"runs/{number}", STOP, *SMALL)
        steps = read_events(Path(f"runs/{number}/events.jsonl"), "step")
        assert [each["step"] for each in steps] == [1, 2]
