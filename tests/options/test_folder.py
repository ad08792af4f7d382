"""Options that a folder of the user's brings: they run only where someone said that they may."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainctl.config import registry
from trainctl.config.overrides import expand_sweep
from trainctl.config.registry import (
    FOLDER_VARIABLE,
    TRUST_VARIABLE,
    environment_trusts_code,
    list_kinds,
    load_spec,
    option_files,
    trusted_folder_variable,
)
from trainctl.config.schema import RunConfig
from trainctl.config.user_code import user_code_files
from trainctl.errors import TrainctlError
from trainctl.examples.parts import write_part
from trainctl.runs.records import read_events
from trainctl.runs.sweeps import new_sweep

PACKAGE = Path(__file__).parent / "package" / "extra_options"
CHOSEN = ("recipe=tiny", "optimizer=signum")
SHORT = (
    *CHOSEN,
    "training.steps=4",
    "training.sequence_length=32",
    "training.global_batch_size=4",
    "training.micro_batch_size=2",
    "training.evaluation_samples=0",
    "training.sample_tokens=0",
    "data.max_bytes=1000000",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.head_dim=8",
    "model.intermediate_size=64",
)


MUTE = """
class Mute(Exception):
    def __str__(self):
        raise ValueError
raise Mute
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with an optimizer: its code under options/, its YAML under conf/."""
    write_part("optimizer", "signum", tmp_path / "own")
    return tmp_path / "own"


@pytest.fixture
def callback(folder: Path) -> Path:
    """Code of a callback in the folder, beside the optimizer."""
    code, values = (folder / name / "callbacks" for name in ("options", "conf"))
    code.mkdir()
    values.mkdir()
    shutil.copy(PACKAGE / "callbacks" / "smoothed.yaml", values)
    return Path(shutil.copy(PACKAGE / "callbacks" / "smoothed.py", code))


@pytest.fixture
def trainctl(folder: Path):
    """Run the command beside the folder; its result."""

    def run(*arguments: str, expect: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "trainctl", *arguments],
            cwd=folder.parent,
            env={**os.environ, "COLUMNS": "200", **variables},
            capture_output=True,
            text=True,
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def trusted(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Option folder that this process trusts for the length of a test."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder / "options"))
    list_kinds.cache_clear()
    load_spec.cache_clear()
    yield folder / "options"
    list_kinds.cache_clear()
    load_spec.cache_clear()


def test_without_trust_nothing_of_it_runs(trainctl, folder: Path) -> None:
    file = folder / "options" / "optimizer" / "signum.py"
    file.write_text("open('ran', 'w')\n" + file.read_text())
    refused = trainctl("validate", "--config-dir", "own", *CHOSEN, expect=2)
    assert f"{file} is code" in refused.stderr
    assert "`--trust-code` runs it" in refused.stderr
    # Trust is for the folder that --config-dir names, not for the one that the command stands in.
    (folder / "options").rename(folder.parent / "options")
    trainctl("validate", "--trust-code", "recipe=tiny", TRAINCTL_TRUST_CODE="1")
    assert not (folder.parent / "ran").exists()


def test_trust_is_given_behind_the_command_or_by_the_environment(trainctl, monkeypatch) -> None:
    chosen = ("validate", "--config-dir", "own", *CHOSEN)
    trainctl(*chosen, "--trust-code")
    trainctl(*chosen, TRAINCTL_TRUST_CODE="1")
    for value, trusts in {"True": True, "1": True, "": False, "0": False, "False": False}.items():
        monkeypatch.setenv(TRUST_VARIABLE, value)
        assert environment_trusts_code() is trusts
    monkeypatch.setenv(TRUST_VARIABLE, "yes")
    with pytest.raises(TrainctlError, match="TRAINCTL_TRUST_CODE=yes is neither 1 nor 0"):
        environment_trusts_code()


def test_it_is_listed_and_its_keys_are_checked(trainctl) -> None:
    trust = ("--trust-code", "validate", "--config-dir", "own", "recipe=tiny")
    trainctl(*trust, "optimizer=signum", "optimizer.smoothing=0.5")
    wrong = trainctl(*trust, "optimizer=signun", expect=2)
    assert "did you mean optimizer=signum?" in wrong.stderr
    foreign = trainctl(*trust, "optimizer=signum", "optimizer.beta1=0.9", expect=2)
    assert "there is no key optimizer.beta1 with optimizer.kind=signum" in foreign.stderr


def test_its_keys_are_in_the_schemas_for_editors(trainctl, folder: Path) -> None:
    own = ("config", "schema", "--config-dir", "own")
    assert "signum.py is code" in trainctl(*own, expect=2).stderr
    shown = json.loads(trainctl(*own, "optimizer", "--trust-code").stdout)
    assert shown["properties"]["smoothing"]["default"] == 0.9
    written = trainctl(*own, "--write", "--trust-code").stderr
    schemas = {path.name: json.loads(path.read_text()) for path in folder.glob(".trainctl/*")}
    assert sorted(schemas) == ["optimizer.schema.json", "recipe.schema.json"]
    assert all(name in written for name in schemas)
    assert "smoothing" in schemas["optimizer.schema.json"]["properties"]
    recipe = schemas["recipe.schema.json"]["properties"]
    assert "smoothing" in recipe["optimizer"]["properties"]
    chosen = recipe["defaults"]["items"]["anyOf"][2]["properties"]["override /optimizer"]
    assert "signum" in chosen["anyOf"][0]["enum"]
    refused = trainctl("config", "schema", "optimizer", "--write", expect=2).stderr
    assert "--write takes neither a group nor --deepspeed" in refused


def test_it_is_completed(trainctl) -> None:
    line = "trainctl --trust-code launch --config-dir own"
    for word, offered in (("optimizer=sig", "optimizer=signum"), ("optimizer.kind=sig", "signum")):
        shown = trainctl(
            _TRAINCTL_COMPLETE="complete_fish",
            _TYPER_COMPLETE_ARGS=f"{line} {word}",
            _TYPER_COMPLETE_FISH_ACTION="get-args",
        )
        assert offered in shown.stdout


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("broken", "import nothing_of_that_name\n", "broken.py cannot be used: ModuleNotFound"),
        ("empty", "", "empty.py cannot be used: AttributeError"),
        ("other", "SPEC = 1\n", "other.py cannot be used: it is no spec of the name other"),
        ("leaves", "import sys\nsys.exit(0)\n", "leaves.py cannot be used: SystemExit: 0"),
        ("ends", "import os\nos._exit(0)\n", "ends.py cannot be used: SystemExit: os._exit(0)"),
        ("mute", MUTE, "mute.py cannot be used: Mute: its message cannot be printed"),
        ("adamw", "", "adamw.py cannot be used: optimizer=adamw is trainctl's own"),
    ],
)
def test_a_file_that_is_no_option_is_named(trainctl, folder, name, text, message) -> None:
    (folder / "options" / "optimizer" / f"{name}.py").write_text(text)
    trust = ("--trust-code", "validate", "--config-dir", "own", *CHOSEN)
    assert message in trainctl(*trust, expect=2 if name == "adamw" else 4).stderr


def test_an_objective_stores_what_a_run_computes(trainctl, folder: Path) -> None:
    file = folder / "options" / "objective" / "own.py"
    file.parent.mkdir()
    base = "from trainctl.options.objective import Objective\n"
    file.write_text(f"{base}SPEC = Objective(name='own', stored=('reference', 'mine'))\n")
    trust = ("--trust-code", "validate", "--config-dir", "own", "recipe=tiny", "objective=own")
    said = trainctl(*trust, expect=4).stderr
    assert "own.py cannot be used: ValueError: stored=mine" in said


def test_what_builds_it_has_to_be_there(trainctl, folder: Path) -> None:
    file = folder / "options" / "optimizer" / "signum.py"
    file.write_text(re.sub(r"build=build", 'build="nope"', file.read_text()))
    said = trainctl("--trust-code", "validate", "--config-dir", "own", *CHOSEN, expect=4).stderr
    assert "build='nope' names no function: write module:function" in said
    why = registry._why_not_built
    assert why("nothing_there:build").endswith("nothing_there, and there is no such module")
    assert why("trainctl.train.optimizers.muon:nope").endswith("muon does not define")
    assert why("trainctl.config.registry:nope").endswith("registry does not define")
    assert not why("") and not why("trainctl.train.optimizers.muon:build")


def test_only_files_that_would_be_options_count(folder: Path) -> None:
    for name in ("optimizer/_rule.py", "optimizer/a.txt", "other/a.py", "logger/board.py"):
        path = folder / "options" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    assert [path.name for path in option_files(folder / "options")] == ["board.py", "signum.py"]


def test_every_other_process_gets_the_folder_and_every_host_has_the_file(trusted: Path) -> None:
    assert trusted_folder_variable() == {FOLDER_VARIABLE: str(trusted)}
    assert "signum" in list_kinds("optimizer")
    spec = load_spec("optimizer", "signum")
    config = RunConfig(optimizer=spec.keys(kind="signum"))
    assert user_code_files(config, Path.cwd()) == [trusted / "optimizer" / "signum.py"]
    assert user_code_files(RunConfig(), Path.cwd()) == []


def test_a_callback_of_the_folder_is_found(trainctl, trusted: Path, callback: Path) -> None:
    config = RunConfig(callbacks={"smoothed": {}})
    assert user_code_files(config, Path.cwd()) == [callback]
    chosen = ("validate", "--config-dir", "own", "recipe=tiny", "callbacks=[smoothed]")
    refused = trainctl(*chosen, expect=2, TRAINCTL_OPTIONS="")
    assert f"{callback} is code" in refused.stderr
    trainctl("--trust-code", *chosen, "callbacks.smoothed.decay=0.1")
    callback.write_text("import nothing_of_that_name\n")
    broken = trainctl("--trust-code", *chosen, expect=4)
    assert "smoothed.py cannot be used: ModuleNotFound" in broken.stderr


def test_where_nobody_trusts_it_a_kind_is_not_there() -> None:
    with pytest.raises(TrainctlError, match="optimizer has no kind 'signum' here") as raised:
        load_spec("optimizer", "signum")
    assert "--trust-code" in raised.value.hint and FOLDER_VARIABLE in raised.value.hint


def test_a_sweep_that_goes_on_has_to_be_trusted_again(trainctl, folder: Path) -> None:
    """It knows the folder that it was made with; here none of its runs was made."""
    overrides = [*CHOSEN, "optimizer.lr=1e-3,1e-4"]
    new_sweep(folder.parent / "sweep", overrides, expand_sweep(overrides), folder)
    refused = trainctl("sweep", "sweep", "--resume", "--dry-run", expect=2)
    assert "signum.py is code" in refused.stderr
    left = trainctl("--trust-code", "sweep", "sweep", "--resume", "--dry-run").stdout
    assert "0: make" in left and "1: make" in left


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
def test_it_trains_and_goes_on_from_its_checkpoint(trainctl, folder: Path, callback: Path) -> None:
    trust, own = ("--trust-code",), ("--config-dir", "own")
    first = ("callbacks=[smoothed]", "training.stop_after_steps=2", "--run-dir", "run")
    trainctl(*trust, "launch", *own, *SHORT, *first)
    later = ("run", "training.stop_after_steps=null")
    assert "--trust-code" in trainctl("resume", *later, expect=4).stderr
    trainctl(*trust, "resume", *own, *later)
    steps = read_events(folder.parent / "run" / "events.jsonl", "step")
    assert [each["step"] for each in steps] == [1, 2, 3, 4]
    trainctl("config", "show", "run", expect=4)
    trainctl("config", "show", "run", **{FOLDER_VARIABLE: "own/options"})
