"""`config show`, `deepspeed`, `why` and `diff`, on recipes and on runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from trainctl.cli.arguments import split_target
from trainctl.cli.main import run
from trainctl.cli.planning import compose
from trainctl.errors import ExitCode
from trainctl.runs.directory import create_run


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run_directory(tmp_path: Path) -> str:
    config = compose(["recipe=tiny", "optimizer.lr=1e-4"], None).config
    create_run(config, run_dir=tmp_path / "runs" / "one")
    return "runs/one"


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["config", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "target", "overrides"),
    [
        (None, None, []),
        (["a=b", "c"], None, ["a=b", "c"]),
        (["runs/x", "a=b"], "runs/x", ["a=b"]),
        (["~a"], None, ["~a"]),
        (["+a=b"], None, ["+a=b"]),
    ],
)
def test_only_a_leading_word_without_an_equals_sign_is_a_target(
    arguments: list[str] | None, target: str | None, overrides: list[str]
) -> None:
    assert split_target(arguments) == (target, overrides)


def test_show_takes_overrides_a_recipe_or_a_run(
    run_directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = yaml.safe_load(output(capsys, "show", "recipe=tiny", "optimizer.lr=1e-4"))
    assert typed["optimizer"]["lr"] == 1e-4
    assert yaml.safe_load(output(capsys, "show", "tiny", "optimizer.lr=1e-4")) == typed
    assert yaml.safe_load(output(capsys, "show", run_directory)) == typed
    assert json.loads(output(capsys, "show", run_directory, "--json")) == typed


def test_deepspeed_prints_json_with_nothing_left_open(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "deepspeed", "7b-zero3", "hardware=8xh100-80g")
    assert json.loads(text)["zero_optimization"]["stage"] == 3
    assert '"auto"' not in text


def test_why_lists_the_layers_in_the_order_of_application(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = json.loads(
        output(capsys, "why", "optimizer.lr", "recipe=tiny", "optimizer.lr=1e-3", "--json")
    )
    assert answer["value"] == 1e-3
    sources = [layer["source"].partition(":")[0] for layer in answer["layers"]]
    assert sources == ["conf/optimizer/adamw.yaml", "recipes/tiny.yaml", "optimizer.lr=1e-3"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("train_batch_size", 64), ("total_steps", 30), ("zero_optimization.stage", 3)],
)
def test_why_explains_derived_values(
    key: str, value: int, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["training.global_batch_size=64", "training.steps=30", "zero_stage=3"]
    answer = json.loads(output(capsys, "why", key, "tiny", *typed, "--json"))
    assert answer["value"] == value
    assert answer["reason"]
    assert f"{key} = {value}\n  because: {answer['reason']}" in output(
        capsys, "why", key, "tiny", *typed
    )


def test_why_says_when_a_value_is_a_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the default of the schema" in output(capsys, "why", "model.mup", "tiny")


@pytest.mark.parametrize(
    ("typed", "near"), [("lr", "optimizer.lr"), ("optimizer.lrr", "optimizer.lr")]
)
def test_why_suggests_the_nearest_key(
    typed: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["config", "why", typed, "recipe=tiny"]) == ExitCode.bad_input
    assert f"did you mean {near}" in capsys.readouterr().err


def test_diff_of_a_recipe_and_a_run(run_directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(output(capsys, "diff", "tiny", run_directory, "--json")) == [
        {"key": "optimizer.lr", "left": 0.003, "right": 0.0001}
    ]
    rows = [line.split() for line in output(capsys, "diff", "tiny", run_directory).splitlines()]
    assert rows == [["key", "tiny", run_directory], ["optimizer.lr", "0.003", "0.0001"]]


def test_diff_of_the_same_is_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "diff", "tiny", "tiny"]) == 0
    assert capsys.readouterr() == ("", "tiny and tiny are the same\n")


@pytest.mark.parametrize("command", ["show", "deepspeed"])
def test_a_path_that_is_no_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", command, "runs/none"]) == ExitCode.run_state
    assert "runs/none does not exist" in capsys.readouterr().err
