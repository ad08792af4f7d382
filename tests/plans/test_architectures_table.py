"""Tests that the table of axes per architecture is the script's result, and the page's content."""

import subprocess
import sys
from pathlib import Path

import pytest
from anatomies import SMALL
from plan_cases import config_with, gpus

from trainctl.options import architectures
from trainctl.options.model import AXES
from trainctl.rules.resolve import resolve

ROOT = Path(__file__).parents[2]


def refusals(model_type, **axes):
    settings = {f"parallelism__{name}": value for name, value in axes.items()}
    config = config_with(
        model__family="hf",
        model__path="m",
        model__model_type=model_type,
        model__num_layers=2,
        model__anatomy=SMALL,
        **settings,
    )
    return [item for item in resolve(config, gpus(8)).findings if item.rule == "TC014"]


def test_the_page_has_the_table():
    command = [sys.executable, ROOT / "scripts" / "architectures.py", "--check"]
    assert subprocess.run(command, capture_output=True, text=True).returncode == 0


def test_every_row_says_something_of_every_axis():
    table = architectures.architectures_table()
    assert set(AXES) < set(architectures.COLUMNS)
    for name, cells in table.rows.items():
        assert tuple(cells) == architectures.COLUMNS, name
        for cell in cells.values():
            assert (isinstance(cell, str) and cell) or 0 <= cell <= table.tolerance


def test_what_was_shown_may_be_cut():
    for axis in AXES:
        for model_type in architectures.architectures_supporting(axis):
            assert not refusals(model_type, **{axis: 2}), (model_type, axis)


@pytest.mark.parametrize(
    ("model_type", "axes", "why"),
    [
        ("bloom", {"pipeline": 2}, "; shown for llama, mistral, qwen2"),
        ("gemma2", {"sequence": 2}, "mask of the whole sequence"),
        ("mixtral", {"tensor": 2, "sequence_sharded_norms": True}, "routers need the whole"),
    ],
)
def test_what_was_not_is_refused_with_the_reason(model_type, axes, why):
    (finding,) = refusals(model_type, **axes)
    assert why in finding.message
    assert not refusals(model_type)
