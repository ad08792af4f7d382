"""`trainctl recipes`."""

from __future__ import annotations

import json
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
    assert rows["70b-zero3-nodes"]["fits_here"] is False
    assert rows["70b-zero3-nodes"]["reason"]


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
