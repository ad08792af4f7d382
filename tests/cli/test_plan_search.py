"""`trainctl plan`."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from made_runs import new_run

import trainctl as tc
from trainctl.cli.main import run
from trainctl.config.catalog import list_recipes
from trainctl.errors import ExitCode
from trainctl.monitor.search_text import search_lines
from trainctl.tuning.speed import TIME_ERROR

MODEL = ["model=llama-7b", "hardware=8xh100-80g", "training.sequence_length=4096"]
HARDWARE = "8xh100-80g"
LENGTH = ["training.tokens=100B"]
BATCH = ["training.global_batch_tokens=4194304"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_best_few_with_their_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *MODEL, *BATCH, "--top", "3"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("llama-7b on 8xh100-80g, sequences of 4,096 tokens: 3 of ")
    assert "\n1. ZeRO " in text
    assert "\n3. ZeRO " in text
    assert "\n4. " not in text
    assert "tokens/s a device, MFU " in text
    assert " of 79.6 GiB a device" in text
    assert text.count("   time: compute ") == 3
    assert text.count("   beside 1: ") == 2
    assert re.search(r"\n   kernels=plain: -\d+% tokens/s, \+\d+\.\d GiB a device", text)
    assert "billion tokens" not in text  # no price was given
    assert "to train" not in text  # no length


def test_length_and_price(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *MODEL, *BATCH, *LENGTH, "--top", "1", "--price", "2.5", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    rate = 8 * plan["tokens_per_second_per_device"]
    assert plan["cost_per_billion_tokens"] == pytest.approx(8 * 2.5 * 1e9 / rate / 3600)
    assert plan["seconds_to_train"] == pytest.approx(1e11 / rate, rel=1e-3)
    assert sum(plan["seconds_by_part"].values()) == pytest.approx(plan["seconds_per_step"])
    assert 0.2 < plan["model_flops_utilisation"] < 0.7
    assert run(["plan", *MODEL, *BATCH, *LENGTH, "--top", "1", "--price", "2.5"]) == 0
    text = capsys.readouterr().out
    assert "days to train 100,00" in text
    assert "for a billion tokens (between " in text


@pytest.mark.parametrize("target", ["model=llama-7b", "recipe=7b-zero3", "7b-zero3", "llama-7b"])
def test_the_last_line_launches_the_first_plan(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a b.txt").write_text("Some prose.\n" * 9000)
    words = [target, f"hardware={HARDWARE}", *LENGTH, "data=files", "data.paths=['a b.txt']"]
    words += [] if "zero3" in target else BATCH
    assert run(["plan", *words, "--top", "1"]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    program, *typed = shlex.split(line)
    assert program == "trainctl" and typed[0] == "launch"
    assert {f"hardware={HARDWARE}", *LENGTH} < set(typed)
    assert any(target in (word, word.partition("=")[2]) for word in typed)
    found = tc.search(*words, top=1)
    assert run(["launch", "--dry-run", "--json", *typed[1:]]) == 0
    launched = json.loads(capsys.readouterr().out)
    assert launched["plan"]["deepspeed"] == found[0].plan.deepspeed_json


def test_a_plan_without_a_length_says_what_the_command_lacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["plan", *MODEL, *BATCH, "--top", "1"]) == 0
    *_, note, line = capsys.readouterr().out.splitlines()
    assert line.startswith("trainctl launch model=llama-7b ") and "training.tokens=" in note


def test_a_run_is_resumed_with_its_new_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = new_run(tmp_path / "run").root
    assert run(["plan", str(path), "hardware=8xh100-80g", "--top", "1"]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert line.startswith(f"trainctl resume {path} hardware=8xh100-80g ")


def test_a_model_alone_is_planned_for_its_own_length() -> None:
    found = tc.search("gpt2-124m", hardware="8xh100-80g", top=1)
    assert found.assumed == ("training.global_batch_tokens=4M", "training.sequence_length=1024")
    text = repr(found)
    assert text.startswith("gpt2-124m on 8xh100-80g, sequences of 1,024 tokens: ")
    assert "assumed, since nothing sets it: training.global_batch_tokens=4M" in text
    assert "training.sequence_length=1024 (the longest that gpt2-124m is defined for)" in text
    assert found.to_dict()["assumed"] == list(found.assumed)
    words = ("training.sequence_length=512", "training.global_batch_tokens=1M")
    found = tc.search("gpt2-124m", *words, hardware="8xh100-80g", top=1)
    assert found.assumed == () and "assumed" not in repr(found)


def test_predicted_times_have_a_range(capsys: pytest.CaptureFixture[str]) -> None:
    found = tc.search(*MODEL, *BATCH, *LENGTH, top=1)
    (plan,) = found.to_dict(price=2.5)["plans"]
    low, high = plan["seconds_per_step_low"], plan["seconds_per_step_high"]
    assert low == pytest.approx(plan["seconds_per_step"] / (1 + TIME_ERROR))
    assert high == pytest.approx(plan["seconds_per_step"] / (1 - TIME_ERROR))
    assert (found[0].seconds_per_step_low, found[0].seconds_per_step_high) == (low, high)
    text = "\n".join(search_lines(found.details, 2.5))
    assert f" s a step (between {low:.2f} s and {high:.2f} s)" in text
    assert text.count("between") >= 3, "step, training, cost"


def test_the_plan_of_the_json_can_be_launched(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *MODEL, *BATCH, *LENGTH, "--top", "2", "--json"]) == 0
    for plan in json.loads(capsys.readouterr().out)["plans"]:
        chosen = [*MODEL, *BATCH, *LENGTH, *plan["overrides"]]
        assert run(["estimate-memory", *chosen, "--json", "--no-calibration"]) == 0
        memory = json.loads(capsys.readouterr().out)
        assert memory["device_peak_bytes"] == plan["device_peak_bytes"]
        assert memory["fits"] is True


@pytest.mark.parametrize("batch", [BATCH, ["training.global_batch_size=1024"]])
def test_a_saved_recipe_validates(batch: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipes").mkdir()
    arguments = [*MODEL, *LENGTH, *batch, "optimizer.lr=1e-4", "deepspeed.dump_state=true"]
    assert run(["plan", *arguments, "--write", "recipes/mine.yaml"]) == 0
    assert "trainctl launch recipe=mine" in capsys.readouterr().err
    comment, summary, *_ = Path("recipes/mine.yaml").read_text().splitlines()
    schema = Path("recipes") / comment.removeprefix("# yaml-language-server: $schema=")
    jsonschema.validate(
        yaml.safe_load(Path("recipes/mine.yaml").read_text()), json.loads(schema.read_text())
    )
    (info,) = (each for each in list_recipes() if each.name == "mine")
    assert info.summary == summary.removeprefix("# ")
    assert run(["validate", "recipe=mine"]) == 0
    assert capsys.readouterr().out == "mine is valid on 8xh100-80g\n"
    assert run(["config", "show", "recipe=mine", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    config = shown.get("config", shown)
    assert config["optimizer"]["lr"] == 1e-4
    assert config["deepspeed"] == {"dump_state": True}
    assert run(["plan", *arguments, "--write", "recipes/mine.yaml"]) == ExitCode.bad_input
    assert "is there already" in capsys.readouterr().err


def test_what_an_option_replaced_stays_replaced_in_a_saved_recipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("recipes").mkdir()
    arguments = ["recipe=7b-zero3", "schedule=linear", "--top", "1"]
    assert run(["plan", *arguments, "--write", "recipes/mine.yaml"]) == 0
    capsys.readouterr()
    schedules = []
    for chosen in (["recipe=7b-zero3", "schedule=linear"], ["recipe=mine"]):
        assert run(["config", "show", *chosen, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        schedules.append(shown.get("config", shown)["schedule"])
    assert schedules[0] == schedules[1]


def test_a_recipe_of_several_machines_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    Path("plans").mkdir()
    arguments = ["recipe=7b-zero2", "hardware=2x8xa100-80g", "--write", "plans/two.yaml"]
    assert run(["plan", *arguments]) == 0
    assert "trainctl launch --config-dir plans recipe=two" in capsys.readouterr().err
    assert "  - 7b-zero2\n" in Path("plans/two.yaml").read_text()
    assert run(["validate", "--config-dir", "plans", "recipe=two"]) == 0
    assert capsys.readouterr().out == "two is valid on 2x8xa100-80g\n"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([*MODEL], ExitCode.bad_input, "training.global_batch_tokens=4M"),
        ([*MODEL, *BATCH, "--write", "x.yaml"], ExitCode.bad_input, "training.tokens=1T"),
        ([*MODEL, *BATCH, *LENGTH, "--write", "x.yml"], ExitCode.bad_input, "x.yaml"),
        ([*MODEL, *BATCH, *LENGTH, "--write", "no/x.yaml"], ExitCode.bad_input, "no folder no"),
        ([*MODEL, *BATCH, *LENGTH, "--write", "7b-zero3.yaml"], ExitCode.bad_input, "would hide"),
        ([*MODEL, *BATCH, *LENGTH, "--write", "base.yaml"], ExitCode.bad_input, "would hide"),
        ([*MODEL, *BATCH, "zero_stage=4"], ExitCode.bad_input, "0, 1, 2, 3"),
        (
            ["model=llama-405b", "hardware=1xt4-16g", *BATCH, "precision=fp16"],
            ExitCode.does_not_fit,
            "the least that was tried needs",
        ),
        ([*MODEL, *BATCH, "checkpoint.best_of=x"], ExitCode.bad_input, "checkpoint.best_of"),
    ],
)
def test_what_cannot_be_planned(
    arguments: list[str], code: ExitCode, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *arguments]) == code
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""


def test_rates_that_are_not_known_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    declared = ["hardware=8xa100-80g", "hardware.memory_bandwidth_gb_per_second=null"]
    arguments = ["model=llama-7b", *declared, *BATCH, *LENGTH, "--top", "1", "--write", "mine.yaml"]
    assert run(["plan", *arguments]) == 0
    assert "only the order means something" in capsys.readouterr().err
    assert "Predicted" not in Path("mine.yaml").read_text()


def test_planning_needs_no_torch() -> None:
    program = (
        "import sys; from trainctl.cli.main import run; "
        f"code = run(['plan', '--top', '1', *{[*MODEL, *BATCH]!r}]); "
        "sys.exit(code or ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=os.environ)
    assert done.returncode == 0, done.stderr
