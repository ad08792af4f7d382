"""Data, tokenizer and weights of a launch: shown in the plan; placeholders are warned of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_files import asked, write_tokenizer
from made_runs import new_run

import trainctl as tc
from trainctl.cli.main import run
from trainctl.errors import ExitCode, TrainctlError

FROM_SCRATCH = ("125m", "1b-zero1", "7b-zero2", "7b-zero3", "13b-zero3", "70b-zero3-nodes")
FINE_TUNING = (
    "7b-zero3-offload",
    "7b-zero3-nvme",
    "8b-long-context",
    "sft-8b-full-8x80g",
    "sft-8b-lora-1x24g",
    "sft-70b-lora-8x80g",
    "sft-70b-qlora-1x80g",
    "dpo-8b-lora",
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))


def findings(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, str]]:
    """Return the findings of `validate`, by key."""
    run(["validate", "--json", *words])
    found = json.loads(capsys.readouterr().out)["findings"]
    return {each["key"]: each for each in found}


@pytest.mark.parametrize("recipe", FROM_SCRATCH)
def test_a_launch_on_placeholders_is_warned_of_with_the_keys_to_set(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = findings(capsys, f"recipe={recipe}")
    assert found["data.kind"]["rule"] in ("TC410", "TC411")
    assert found["tokenizer.kind"]["rule"] == "TC410"
    assert "tokenizer.path=" in found["tokenizer.kind"]["hint"]
    assert {each["severity"] for each in found.values()} == {"warning"}
    run(["validate", f"recipe={recipe}"])
    error = capsys.readouterr().err
    assert "data.paths=[" in error and "passes over the corpus" in error


@pytest.mark.parametrize("recipe", FINE_TUNING)
def test_fine_tuning_without_weights_is_refused(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = findings(capsys, f"recipe={recipe}")["model.weights"]
    assert (weights["rule"], weights["severity"]) == ("TC144", "error")
    assert "model.path=DIR" in weights["hint"] and "model.initial_weights=DIR" in weights["hint"]
    assert run(["launch", "--dry-run", f"recipe={recipe}"]) == ExitCode.bad_input


@pytest.mark.parametrize("recipe", FINE_TUNING)
def test_planning_needs_no_data_and_no_weights(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["estimate-memory", f"recipe={recipe}"]) == 0
    assert "error" not in capsys.readouterr().err


WARNED = [
    ["7b-zero3"],
    ["1b-zero1", "hardware=8xa100-80g", "training.tokens=10T"],
    ["tiny", "training.steps=1000000"],
    ["tiny", "data=files", "data.paths=[texts]", "data.held_out_fraction=0.3"],
    ["tiny", "data=files", "data.paths=[texts/*.py]", "data.filters={gopher_quality: {}}"],
    ["tiny", "script=train.py", "checkpoint.keep=2"],
    ["125m", "hardware=1xt4-16g", "precision=fp16", "training.micro_batch_size=64"],
]


@pytest.mark.parametrize("words", WARNED, ids=" ".join)
def test_every_planning_command_warns_where_validate_does(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("Some prose.\n" * 400_000)
    (tmp_path / "texts" / "b.py").write_text("print()\n" * 4000)
    (tmp_path / "train.py").touch()
    run(["validate", "--json", *words])
    findings = json.loads(capsys.readouterr().out)["findings"]
    warnings = {each["rule"]: each for each in findings if each["severity"] == "warning"}
    assert warnings
    planned = {each.rule: each.to_json() for each in tc.plan(*words).findings}
    assert {rule: planned.get(rule) for rule in warnings} == warnings
    run(["estimate-memory", *words])
    error = capsys.readouterr().err
    assert all(each["message"] in error for each in warnings.values()), error


def test_a_comparison_a_search_and_a_sweep_warn_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=7b-zero3", "hardware=8xh100-80g"]
    run(["estimate-memory", *words, "zero_stage=2,3"])
    compared = capsys.readouterr().err
    run(["plan", *words])
    searched = capsys.readouterr().err
    words = ["recipe=tiny", "training.steps=1000000", "optimizer.lr=1e-3,1e-4"]
    assert run(["sweep", *words, "--dry-run"]) == 0
    swept = capsys.readouterr().err
    assert compared.count("is no model of bytes") == searched.count("is no model of bytes") == 1
    assert compared.count("passes over the corpus") == 1
    assert searched.count("passes over the corpus") == 1
    assert swept.count("passes over the corpus") == 1


def test_a_plan_reads_no_url_and_downloads_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainctl.readers.remote.file_system_of", pytest.fail)
    monkeypatch.setattr("trainctl.tuning.input_files.fetch_weights", pytest.fail)
    weights = Path("models--a--b/snapshots/0")
    weights.mkdir(parents=True)
    files = ["data=files", "data.paths=[s3://bucket/text]"]
    tc.plan("tiny", *files, f"model.initial_weights={weights}")
    source = "data.sources={a: {kind: files, paths: [s3://bucket/text], weight: 1}}"
    tc.plan("tiny", source)


def test_the_demonstration_is_what_it_is_meant_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert findings(capsys, "recipe=tiny") == {}
    assert run(["launch", "--dry-run", "recipe=tiny"]) == 0
    lines = capsys.readouterr().out
    assert "  data      stdlib: about 11.5 M tokens to train on, epochs: 0.057\n" in lines
    assert "  weights   random at step 0" in lines
    assert "  tokenizer byte: 257 of 264 ids" in lines


def test_users_text_and_tokenizer_are_no_placeholders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("Some prose.\n" * 4000)
    tokenizer = write_tokenizer(tmp_path / "m")
    mine = ["tokenizer=hf", f"tokenizer.path={tokenizer}"]
    found = findings(capsys, "recipe=125m", "data=files", "data.paths=[a.txt]", *mine)
    assert [each["rule"] for each in found.values()] == ["TC411"]
    few = ["training.tokens=null", "training.steps=1"]
    assert findings(capsys, "recipe=125m", "data=files", "data.paths=[a.txt]", *mine, *few) == {}
    found = findings(capsys, "recipe=125m", *mine, *few)
    assert "model of bytes" in found["data.kind"]["message"]
    found = findings(capsys, "recipe=125m", "data=files", "data.paths=[a.txt]", *few)
    assert [(key, each["rule"]) for key, each in found.items()] == [("tokenizer.kind", "TC410")]


def test_more_than_fifty_passes_are_warned_of_unless_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("Some prose.\n" * 4000)
    source = "data.sources={{a: {{kind: files, paths: [a.txt], weight: 1{}}}}}"
    found = findings(capsys, "recipe=tiny", "training.steps=700", source.format(""))
    assert found["data.sources.a.kind"]["rule"] == "TC411"
    assert "63 passes over a" in found["data.sources.a.kind"]["message"]
    assert not findings(capsys, "recipe=tiny", "training.steps=500", source.format(""))
    allowed = source.format(", max_epochs: 70")
    assert not findings(capsys, "recipe=tiny", "training.steps=700", allowed)


def test_files_that_are_not_named_are_reported_once_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = findings(capsys, "recipe=sft-8b-lora-1x24g", "training.steps=null", "training.epochs=2")
    assert {key: each["rule"] for key, each in found.items()} == {
        "data.paths": "TC074",
        "tokenizer.path": "TC073",
        "model.weights": "TC144",
    }
    found = findings(capsys, "recipe=tiny", "data.sources={a: {kind: files, weight: 1}}")
    assert {key: each["rule"] for key, each in found.items()} == {"data.sources.a.paths": "TC074"}


def test_a_tokenizer_that_a_wrong_directory_would_bring_is_no_second_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = findings(capsys, "recipe=tiny", "model=hf", "model.path=/nonexistent", "tokenizer=hf")
    assert {key: each["rule"] for key, each in found.items()} == {"model.path": "TC113"}


def test_random_weights_are_fine_tuned_where_they_are_requested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (json.dumps({"messages": asked((f"{n}?", f"{n}"))}) for n in range(40))
    (tmp_path / "chat.jsonl").write_text("\n".join(rows))
    folder = write_tokenizer(tmp_path / "m")
    words = ["recipe=tiny", "adapter=lora", "data=chat", "data.paths=[chat.jsonl]"]
    words += ["tokenizer=hf", f"tokenizer.path={folder}", "training.steps=20"]
    assert list(findings(capsys, *words)) == ["model.weights"]
    assert findings(capsys, *words, "model.weights=random") == {}
    assert run(["launch", "--dry-run", *words, "model.weights=random"]) == 0
    assert "  data      chat chat.jsonl: about " in capsys.readouterr().out


def test_a_recipe_comes_first_in_every_command_that_makes_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "my.yaml").write_text("defaults: [tiny, _self_]\ntraining: {seed: 9}\n")
    assert run(["launch", "my", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["config"]["training"]["seed"] == 9
    assert run(["sweep", "my", "optimizer.lr=1e-3,1e-4", "--dry-run"]) == 0
    assert "1: recipe=my optimizer.lr=0.0001" in capsys.readouterr().out
    measured: list[str] = []

    def measure(words: list[str], *_: object, **__: object) -> None:
        measured.extend(words)
        raise TrainctlError("nothing is measured here")

    monkeypatch.setattr("trainctl.cli.estimate_memory.measure", measure)
    run(["estimate-memory", "my", "training.steps=3", "--measure"])
    assert measured == ["recipe=my", "training.steps=3"]


def test_a_launch_names_resume_for_a_run_and_the_nearest_for_another_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = new_run(tmp_path / "run").root
    for words, hint in (
        ([str(path)], f"trainctl resume {path} continues it"),
        (["tinny"], "did you mean recipe=tiny"),
        (["optimizer.lr", "recipe=tiny"], "write optimizer.lr=VALUE"),
        (["model", "recipe=tiny"], "write model=OPTION"),
    ):
        assert run(["launch", *words]) == ExitCode.bad_input
        assert hint in capsys.readouterr().err
