"""Completion, as bash and fish ask for it; bash itself is run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainctl.cli.arguments import complete_key, complete_overrides
from trainctl.config.catalog import search_folders
from trainctl.config.keys import leaves
from trainctl.config.overrides import read_overrides

pytestmark = pytest.mark.usefixtures("preloaded")

BIN = Path(sys.executable).parent
FUNCTION = """
eval "$(trainctl --show-completion bash)"
ask() {
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
  _trainctl_completion trainctl
  echo "${COMPREPLY[*]}" | tr '\\n' ' '; echo
}
"""
ASKED = {
    "trainctl lau": {"launch"},
    "trainctl launch recipe = ti": {"tiny"},
    "trainctl launch zero_stage =": {"0", "1", "2", "3"},
    "trainctl launch optimizer.kind = ada": {"adam", "adamw", "adamw_8bit", "adafactor"},
    "trainctl launch recipe = tiny zero_stage.over": {
        "zero_stage.overlap_comm=true",
        "zero_stage.overlap_comm=false",
    },
    "trainctl launch hardware = 4x8xh1": {"4x8xh100-80g"},
    "trainctl config why total": set(),
    "trainctl config why optimizer.beta": {"optimizer.beta1", "optimizer.beta2"},
    "trainctl config show ti": {"tiny"},
    "trainctl resume runs/": {"runs/mine"},
    "trainctl launch --dry": {"--dry-run"},
}


def environment() -> dict[str, str]:
    path = f"{BIN}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}


@pytest.mark.slow
def test_bash(tmp_path: Path) -> None:
    for name in ("config.yaml", "run.json"):
        path = tmp_path / "runs" / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    lines = FUNCTION + "".join(f"ask {words}\n" for words in ASKED)
    done = subprocess.run(
        ["bash", "--norc", "-c", lines],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
    )
    assert done.stderr == ""
    found = [set(line.split()) for line in done.stdout.splitlines()]
    assert dict(zip(ASKED, found, strict=True)) == ASKED


def test_fish_shows_what_a_word_means() -> None:
    done = subprocess.run(
        [BIN / "trainctl"],
        capture_output=True,
        text=True,
        env={
            **environment(),
            "_TRAINCTL_COMPLETE": "complete_fish",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            "_TYPER_COMPLETE_ARGS": "trainctl launch optimizer.beta1",
        },
    )
    assert done.stdout == "optimizer.beta1=0.9\tDecay rate of the first moment.\n"


def test_a_users_own_options_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("conf/optimizer/mine.yaml", "recipes/my-recipe.yaml"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("# mine\n")
    assert ("optimizer=mine", "an option of optimizer") in complete_overrides("optimizer=m")
    assert complete_overrides("recipe=my") == [("recipe=my-recipe", "a recipe")]


def test_every_key_is_offered_and_every_override_is_legal() -> None:
    assert {word for word, _ in complete_key("")} == set(leaves())
    words = [word for word, _ in complete_overrides("")]
    keys = [word for word in words if "." in word.partition("=")[0]]
    assert len(keys) > 200
    asked = read_overrides(keys, search_folders())
    assert not [finding for finding in asked.findings if finding.is_error]


def test_completion_loads_neither_hydra_nor_torch() -> None:
    script = (
        "import sys; from trainctl.cli.arguments import complete_overrides as c; c('optimizer');"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert not set(done.stdout.split()) & {"hydra", "omegaconf", "torch", "deepspeed", "numpy"}
