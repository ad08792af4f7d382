"""`trainctl data plan`: what a run will see of its sources, as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainctl.cli.main import run
from trainctl.errors import ExitCode

RECIPE = """\
# Two sources.
defaults: [tiny, _self_]
data:
  sources:
    code:  {paths: [corpus/code], weight: 0.7}
    prose: {paths: [corpus/prose.jsonl], text_key: body, weight: 0.3, max_epochs: 40}
  stages:
    - {until: 0.8}
    - {weights: {code: 0.2, prose: 0.8}, sequence_length: 32}
"""


@pytest.fixture(autouse=True)
def _corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))
    for folder in ("recipes", "corpus/code"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "recipes" / "mix.yaml").write_text(RECIPE)
    for number in range(20):
        (tmp_path / "corpus" / "code" / f"{number}.txt").write_text("def f():\n" * 3000)
    lines = (json.dumps({"body": f"some text, number {n}, " * 9}) for n in range(900))
    (tmp_path / "corpus" / "prose.jsonl").write_text("\n".join(lines))


def test_as_json_it_has_each_stage_and_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "plan", "mix", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    first, second = out["stages"]
    assert (first["first_step"], second["first_step"], second["end_step"]) == (0, 128, 160)
    assert set(first["sources"]["code"]) == {"tokens", "samples", "share", "epochs"}
    assert first["sources"]["code"]["share"] == pytest.approx(0.7, abs=1e-3)
    assert second["sources"]["prose"]["tokens"] == pytest.approx(32 * 4096 * 0.8, abs=64)
    assert second["global_batch_size"] == 8 * first["global_batch_size"]
    for name, use in out["run"]["sources"].items():
        assert use["tokens"] == sum(stage["sources"][name]["tokens"] for stage in out["stages"])
    assert out["sources"]["code"]["is_estimate"] and out["problems"] == []
    assert out["sources"]["code"]["tokens"] == pytest.approx(19 * 27_000, rel=0.01)


def test_the_table_and_the_picture_fit_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "plan", "mix", "--plot", "mix.svg"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert max(map(len, lines)) <= 100 and "whole run" in captured.out
    bars = [line for line in lines if "█" in line and "▓" in line]
    assert [(bar.count("█"), bar.count("▓")) for bar in bars[:2]] == [(42, 18), (12, 48)]
    assert "guessed from the size of the files" in captured.err
    assert "share of the tokens" in Path("mix.svg").read_text()


def test_what_is_short_is_reported_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["data", "plan", "mix", "data.sources.prose.max_epochs=0.5", "--json"]
    assert run(command) == ExitCode.bad_input
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["key"] == "data.sources.prose.max_epochs"
    assert "prose falls short by" in problem["message"]
    assert problem["source"] == "data.sources.prose.max_epochs=0.5"


def test_all_sources_that_cannot_be_read_are_reported_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["mix", "data.sources.code.paths=[nothing]", "data.sources.prose.text_key=bod"]
    for name in (["data", "plan"], ["validate"]):
        assert run([*name, *command]) == ExitCode.bad_input
        err = capsys.readouterr().err
        assert "data.sources.code.paths: no file matches 'nothing'" in err
        assert "hint: data.sources.prose.text_key=body" in err


def test_a_recipe_of_one_source_has_a_plan_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "plan", "recipe=tiny", "--json"]) == 0
    (stage,) = json.loads(capsys.readouterr().out)["stages"]
    assert list(stage["sources"]) == ["data"]
