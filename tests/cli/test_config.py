"""`config show`, `deepspeed`, `why` and `diff`, on recipes and on runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from trainctl.cli.main import run
from trainctl.config.overrides import split_target
from trainctl.errors import ExitCode
from trainctl.launchers.planning import compose_config, plan_config
from trainctl.runs.directory import create_run, new_attempt, open_run


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run_directory(tmp_path: Path) -> str:
    config = compose_config(["recipe=tiny", "optimizer.lr=1e-4"], None).config
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


def test_a_run_is_shown_as_its_last_attempt_has_it_and_edits_are_named(
    run_directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = open_run(Path(run_directory))
    for lr in ("1e-4", "2e-4"):
        made = plan_config(
            compose_config(["recipe=tiny", f"optimizer.lr={lr}"], None)
        ).assessment.plan
        assert made is not None
        new_attempt(paths, made)
    assert yaml.safe_load(output(capsys, "show", run_directory))["optimizer"]["lr"] == 2e-4
    first = (run_directory, "--attempt", "1")
    assert yaml.safe_load(output(capsys, "show", *first))["optimizer"]["lr"] == 1e-4
    folder = f"{run_directory}/attempts/1"
    assert yaml.safe_load(output(capsys, "show", folder))["optimizer"]["lr"] == 1e-4
    shown = json.loads(output(capsys, "deepspeed", run_directory))["optimizer"]["params"]["lr"]
    assert shown == 2e-4
    answer = json.loads(output(capsys, "why", "optimizer.lr", run_directory, "--json"))
    assert answer["value"] == 2e-4
    assert answer["layers"][-1]["source"] == "attempt 2 of the run"
    (change,) = json.loads(
        output(capsys, "diff", run_directory, run_directory, "--json", *first[1:])
    )
    assert (change["key"], change["left"], change["right"]) == ("optimizer.lr", 1e-4, 2e-4)
    # Nobody reads config.yaml any more, so whoever edited it is told.
    text = paths.config.read_text()
    paths.config.write_text(text.replace("lr: 0.0001", "lr: 0.5"))
    for arguments in (["show", run_directory], ["why", "optimizer.lr", run_directory]):
        assert run(["config", *arguments]) == 0
        error = capsys.readouterr().err
        assert "TC045" in error and "optimizer.lr: 0.0001 -> 0.5" in error
        assert f"trainctl resume {paths.root} optimizer.lr=0.5" in error
    paths.config.write_text(text.replace("environment: {}", "environment: {API_KEY: hush}"))
    assert run(["config", "show", run_directory]) == 0
    error = capsys.readouterr().err
    assert "TC045" in error and "launcher.environment" in error and "hush" not in error
    paths.config.write_text("a: [")
    assert run(["config", "show", run_directory]) == 0
    assert "is not valid YAML" in capsys.readouterr().err
    assert run(["config", "show", "tiny", "--attempt", "1"]) == ExitCode.bad_input


@pytest.mark.parametrize("command", [["estimate-memory"], ["schedule", "show"], ["validate"]])
def test_other_commands_take_a_run_as_its_last_attempt_has_it(
    run_directory: str, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    made = plan_config(compose_config(["recipe=tiny", "training.steps=77"], None)).assessment.plan
    assert made is not None
    new_attempt(open_run(Path(run_directory)), made)
    assert run([*command, run_directory, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert command != ["schedule", "show"] or shown["total_steps"] == 77


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


def test_why_says_which_layer_won_and_what_became_of_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = output(capsys, "why", "optimizer.lr", "tiny", "optimizer.lr=1e-3").splitlines()
    assert lines[0] == "optimizer.lr = 0.001"
    assert [line.endswith(", which wins") for line in lines[1:4]] == [False, False, True]
    assert lines[3].split() == ["0.001", "set", "by", "optimizer.lr=1e-3,", "which", "wins"]
    assert "  0.0003 is the default of the schema" in lines
    assert "  in DeepSpeed's JSON: optimizer.params.lr = 0.001" in lines
    lines = output(capsys, "why", "schedule.kind", "tiny").splitlines()
    assert "  in DeepSpeed's JSON: nothing" in lines


def test_why_leads_from_the_json_back_to_what_was_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["why", "zero_optimization.stage", "tiny", "zero_stage=3"]
    assert "zero_stage.stage = 3, set by conf/zero_stage/3.yaml:2 (chosen by zero_stage=3)" in (
        output(capsys, *asked)
    )
    (source,) = json.loads(output(capsys, *asked, "--json"))["sources"]
    assert (source["key"], source["value"], source["default"]) == ("zero_stage.stage", 3, 1)


def test_why_names_no_line_that_holds_null_as_what_set_a_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ("why", "train_batch_size", "training.steps=1", "hardware=2xcpu")
    assert "  training.global_batch_size = 2, derived: micro 1 x accumulation 1 x data 2" in (
        output(capsys, *asked)
    )
    asked = (*asked, "training.global_batch_size=4")
    assert "training.global_batch_size = 4, set by training.global_batch_size=4" in (
        output(capsys, *asked)
    )


def test_why_of_a_section_names_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "why", "optimizer", "recipe=tiny"]) == ExitCode.bad_input
    error = capsys.readouterr().err
    assert "optimizer is a section" in error and "optimizer.kind" in error


def test_diff_knows_what_a_null_stands_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    for name, steps in (("same", 2), ("other", 4)):
        (tmp_path / "recipes" / f"{name}.yaml").write_text(
            "defaults: [tiny, _self_]\n"
            "training:\n  global_batch_size: null\n"
            f"  gradient_accumulation_steps: {steps}\n"
        )
    # tiny derives an accumulation of 2 from a global batch of 16: the same thing.
    rows = json.loads(output(capsys, "diff", "tiny", "same", "--json"))
    assert [row["key"] for row in rows] == ["recipe"]
    text = output(capsys, "diff", "tiny", "other")
    rows = [line.split() for line in text.splitlines()[1:-1]]
    assert ["training.global_batch_size", "16", "32", "(derived)"] in rows
    assert ["training.gradient_accumulation_steps", "2", "(derived)", "4"] in rows


def test_diff_names_keys_that_only_one_kind_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipes").mkdir()
    text = "defaults: [tiny, {override /engine: fsdp2}, _self_]\n"
    (tmp_path / "recipes" / "other.yaml").write_text(text)
    own = "engine.reduce_every_micro_batch"
    for sides, values in ((("tiny", "other"), (None, True)), (("other", "tiny"), (True, None))):
        rows = json.loads(output(capsys, "diff", *sides, "--json"))
        assert {"key": own, "left": values[0], "right": values[1]} in rows
        assert f"{own} " in output(capsys, "diff", *sides)
        assert "not set" in output(capsys, "diff", *sides)


def test_diff_of_json_files_is_by_what_deepspeed_makes_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rendered = json.loads(output(capsys, "deepspeed", "tiny"))
    file = tmp_path / "ds_config.json"

    def differences(document: dict[str, object], other: str = "tiny") -> list[str]:
        file.write_text(json.dumps(document))
        return [
            row["key"] for row in json.loads(output(capsys, "diff", str(file), other, "--json"))
        ]

    assert differences(rendered) == []
    # Written otherwise, and the same: a default left out or written out, case, an empty section.
    del rendered["fp16"], rendered["wall_clock_breakdown"]
    rendered["optimizer"]["type"] = "adamw"
    rendered["gradient_clipping"] = 1
    rendered["prescale_gradients"] = False
    rendered["comms_logger"] = {}
    assert differences(rendered) == []
    rendered["zero_optimization"]["stage"] = 1
    rendered["prescale_gradients"] = True
    del rendered["steps_per_print"]
    assert sorted(differences(rendered)) == [
        "prescale_gradients",
        "steps_per_print",
        "zero_optimization.stage",
    ]
    text = output(capsys, "diff", str(file), "tiny")
    assert "False (DeepSpeed's default)" in text
    assert differences({}, other=str(file)) == []


def test_diff_reports_a_file_that_is_not_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text('{"train_batch_size": 3,\n nope}')
    assert run(["config", "diff", str(file), "tiny"]) == ExitCode.bad_input
    assert f"{file}:2" in capsys.readouterr().err
    assert run(["config", "diff", "none.json", "tiny"]) == ExitCode.bad_input
    assert "none.json cannot be read" in capsys.readouterr().err


def test_schema_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["optimizer"], ["--deepspeed"]):
        document = json.loads(output(capsys, "schema", *arguments))
        assert document["type"] == "object" and document["additionalProperties"] is False
    assert run(["config", "schema", "optimiser"]) == ExitCode.bad_input
    assert "did you mean optimizer" in capsys.readouterr().err
