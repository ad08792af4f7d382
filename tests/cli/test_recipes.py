"""`trainctl recipes`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from trainctl.cli.main import run

SHIPPED = Path(__file__).parents[2] / "recipes"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_shipped_recipe_is_listed_with_its_hardware(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["recipes", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == {path.stem for path in SHIPPED.glob("*.yaml")}
    assert all(row["what"] and row["hardware"] for row in rows.values())
    assert rows["tiny"]["fits_here"] is True
    assert rows["13b-zero3"]["fits_here"] is False
    assert rows["13b-zero3"]["reason"]


@pytest.mark.parametrize("without", ["a GPU", "space", "sbatch"])
def test_a_recipe_fits_exactly_where_launch_does_not_refuse_it(
    without: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both commands make the same checks: missing GPUs, a full disk, a missing `sbatch`."""
    name = {"a GPU": "125m", "space": "tiny", "sbatch": "70b-zero3-nodes"}[without]
    monkeypatch.setattr("trainctl.hardware.detect.query_tool", lambda _: "")  # no cards
    if without == "space":
        usage = shutil.disk_usage(".")._replace(free=1)
        monkeypatch.setattr("trainctl.launchers.local.shutil.disk_usage", lambda _: usage)
    if without == "sbatch":
        monkeypatch.setenv("PATH", ".")
    assert run(["launch", f"recipe={name}"]) == 4
    assert not Path("runs").exists()  # no run without a first step is left behind
    refused = capsys.readouterr().err
    assert run(["recipes", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows[name]["fits_here"] is False
    assert rows[name]["reason"] in refused


def test_listing_recipes_contacts_no_other_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "pair.yaml").write_text(
        "# Two hosts.\ndefaults:\n  - tiny\n  - override /launcher: ssh\n  - _self_\n"
        "launcher:\n  hosts: [node-a, node-b]\nhardware:\n  nodes: 2\n"
        "training:\n  global_batch_size: 32\n"
    )
    assert run(["recipes", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["pair"]["fits_here"] is None
    assert "asked when it is launched" in rows["pair"]["reason"]


def test_what_is_handed_to_a_scheduler_fits_perhaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["recipes", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["70b-zero3-nodes"]["fits_here"] is None


def test_the_table_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes"]) == 0
    first_words = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert first_words >= {path.stem for path in SHIPPED.glob("*.yaml")}


def test_a_broken_recipe_of_the_user_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text(
        "# Mine.\ndefaults:\n  - tiny\n  - _self_\noptimizer:\n  lrr: 1\n"
    )
    assert run(["recipes", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["mine"]["fits_here"] is False
    assert rows["tiny"]["fits_here"] is True
