"""Options that a package from outside brings: one Python file and one YAML file each."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainctl.examples.parts import EXAMPLES
from trainctl.runs.records import read_events

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("preloaded")]

PACKAGE = Path(__file__).parent / "package"
MODES = ("activation_checkpointing=marked", "precision=rounded")
OWN = (
    "recipe=tiny",
    "optimizer=signum",
    "objective=focal",
    "schedule=root",
    "logging.to=[board]",
    "logging.board.digits=5",
    "data=fortunes",
    "data.paths=[texts]",
    "callbacks=[smoothed]",
    "launcher=fleet",
    "launcher.fleet_size=3",
    "model=granite",
    *MODES,
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
"""A run with an option of each group from the package, that takes seconds."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that pip installed the package into."""
    folder = tmp_path_factory.mktemp("installed")
    package = tmp_path_factory.mktemp("source") / "package"
    shutil.copytree(PACKAGE, package)
    for path in EXAMPLES.glob("*/*"):  # a package may bring them as a folder does
        if not path.name.startswith(("test_", "__")):
            (package / "extra_options" / path.parent.name).mkdir(exist_ok=True)
            shutil.copy(path, package / "extra_options" / path.parent.name)
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", folder)
    subprocess.run([sys.executable, "-m", "pip", "install", *options, package], check=True)
    return folder


@dataclass(frozen=True)
class Command:
    """The command, in a folder, where the package is installed."""

    installed: Path
    folder: Path

    def __call__(self, *arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        """Run it and expect the exit code; its result."""
        path = os.pathsep.join(filter(None, [str(self.installed), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, "-m", "trainctl", *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done


@pytest.fixture
def trainctl(installed: Path, tmp_path: Path) -> Command:
    return Command(installed, tmp_path)


@dataclass(frozen=True)
class Trained:
    """Runs with every option of the package at once: each start is five seconds of two
    processes."""

    trainctl: Command
    """The command, in the folder of the runs."""
    run: Path
    """Stopped after two steps and resumed."""
    whole: Path
    """Run of the same four steps without a stop."""
    fleets: tuple[str, str]
    """Text that the launcher wrote into `run` at its launch and at its resume."""


@pytest.fixture(scope="module")
def trained(installed: Path, tmp_path_factory: pytest.TempPathFactory, preloaded: None) -> Trained:
    trainctl = Command(installed, tmp_path_factory.mktemp("trained"))
    write_texts(trainctl.folder)
    run, whole = trainctl.folder / "run", trainctl.folder / "whole"
    fleets = []
    for words in (
        ("launch", *OWN, "training.stop_after_steps=2", "--run-dir", "run"),
        ("resume", "run", "training.stop_after_steps=null", "launcher.fleet_size=4"),
    ):
        trainctl(*words)
        fleets.append((run / "fleet.txt").read_text())
    trainctl("launch", *OWN, "--run-dir", "whole")
    return Trained(trainctl, run, whole, (fleets[0], fleets[1]))


def steps(run: Path) -> dict[int, float]:
    """Return the loss of each step."""
    return {each["step"]: each["loss"] for each in read_events(run / "events.jsonl", "step")}


def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(trained: Trained) -> None:
    assert list(steps(trained.run)) == [1, 2, 3, 4]
    assert steps(trained.run) == steps(trained.whole)


def test_it_is_listed_completed_and_documented(trainctl) -> None:
    wrong = trainctl("validate", "recipe=tiny", "optimizer=signun", expect=2)
    assert "did you mean optimizer=signum?" in wrong.stderr
    schema = json.loads(trainctl("config", "schema", "optimizer").stdout)
    assert schema["properties"]["smoothing"]["default"] == 0.9
    assert "signum" in schema["properties"]["kind"]["anyOf"][0]["enum"]
    why = trainctl("config", "why", "optimizer.smoothing", "recipe=tiny", "optimizer=signum")
    assert "Decay of the momentum." in why.stdout and "extra_options/optimizer/signum.yaml" in (
        why.stdout
    )


def test_its_keys_are_checked_and_nobody_elses_are_there(trainctl) -> None:
    chosen = ("validate", "recipe=tiny", "optimizer=signum")
    too_large = trainctl(*chosen, "optimizer.smoothing=2", expect=2)
    assert "0.999" in too_large.stderr
    foreign = trainctl(*chosen, "optimizer.beta1=0.9", expect=2)
    assert "there is no key optimizer.beta1 with optimizer.kind=signum" in foreign.stderr
    refused = trainctl(*chosen, "offload=cpu", expect=2)
    assert "nothing updates its state in host memory" in refused.stderr


def test_its_curve_is_drawn_and_its_keys_are_checked(trainctl) -> None:
    chosen = ("recipe=tiny", "schedule=root", "training.steps=101", "schedule.warmup_steps=0")
    shown = json.loads(trainctl("schedule", "show", *chosen, "--json").stdout)
    rates = [point["learning_rate"] for point in shown["points"]]
    assert shown["kind"] == "root" and rates[-1] == 0
    assert rates[75] == pytest.approx(rates[0] * 0.5)  # the root of a quarter
    foreign = trainctl("validate", *chosen, "schedule.power=2", expect=2)
    assert "there is no key schedule.power with schedule.kind=root" in foreign.stderr
    wrong = trainctl("validate", *chosen, "schedule.degree=0", expect=2)
    assert "schedule.degree" in wrong.stderr


def test_a_logger_has_keys_of_its_own(trainctl) -> None:
    chosen = ("recipe=tiny", "logging.to=[board]")
    wrong = trainctl("validate", "recipe=tiny", "logging.to=[bord]", expect=2)
    assert "did you mean board? It is one of board, mlflow" in wrong.stderr
    schema = json.loads(trainctl("config", "schema", "logging").stdout)["properties"]
    assert schema["board"]["properties"]["digits"]["default"] == 3
    assert schema["to"]["anyOf"][0]["items"]["enum"] == [
        "board", "mlflow", "prometheus", "tensorboard", "trackio", "wandb",
    ]  # fmt: skip
    why = trainctl("config", "why", "logging.board.digits", *chosen)
    assert "Digits of a loss on the board." in why.stdout
    too_many = trainctl("validate", *chosen, "logging.board.digits=99", expect=2)
    assert "nearest legal value: 17" in too_many.stderr
    unknown = trainctl("validate", *chosen, "logging.board.digit=9", expect=2)
    assert "did you mean logging.board.digits" in unknown.stderr
    idle = trainctl("validate", "recipe=tiny", "logging.board.digits=9")
    assert "it needs board in logging.to" in idle.stderr


def test_its_state_is_in_the_budget(trainctl) -> None:
    sizes = {}
    for optimizer in ("signum", "adamw"):
        chosen = ("estimate-memory", "recipe=7b-zero3", f"optimizer={optimizer}", "--json")
        sizes[optimizer] = json.loads(trainctl(*chosen).stdout)["components"]["optimizer_states"]
    assert 2 * sizes["signum"] == sizes["adamw"] > 0


def test_its_state_is_saved_and_is_its_own(trained: Trained) -> None:
    for checkpoint in (trained.run / "checkpoints").glob("step-*"):
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        assert {"momentum_buffer", "step"} >= set(manifest["states"]) - {"master"}
    refused = trained.trainctl("resume", "run", "optimizer=adamw", "training.steps=6", expect=5)
    assert "optimizer" in refused.stderr


def test_a_logger_is_sent_every_step(trained: Trained) -> None:
    board = (trained.run / "board" / "board.txt").read_text().splitlines()
    assert board == [f"{step} {loss:.5f}" for step, loss in steps(trained.run).items()]


def test_a_callback_has_keys_and_checks_of_its_own(trainctl) -> None:
    chosen = ("recipe=tiny", "callbacks=[smoothed]")
    wrong = trainctl("validate", "recipe=tiny", "callbacks=[smothed]", expect=2)
    assert "did you mean callbacks=[smoothed]?" in wrong.stderr
    schema = json.loads(trainctl("config", "schema", "callbacks").stdout)
    (own,) = (each for each in schema["anyOf"] if each.get("title") == "smoothed")
    assert own["properties"]["decay"]["default"] == 0.9
    why = trainctl("config", "why", "callbacks.smoothed.decay", *chosen).stdout
    assert "callbacks.smoothed.decay = 0.5" in why and "callbacks/smoothed.yaml:2" in why
    assert "Decay of the mean." in why
    too_large = trainctl("validate", *chosen, "callbacks.smoothed.decay=2", expect=2)
    assert "nearest legal value: 0.999" in too_large.stderr
    unknown = trainctl("validate", *chosen, "callbacks.smoothed.decai=0.1", expect=2)
    assert "the callback smoothed has no key decai" in unknown.stderr
    assert "did you mean decay?" in unknown.stderr
    shown = trainctl("config", "show", *chosen, "callbacks.smoothed.decay=0.1").stdout
    assert "callbacks:\n  smoothed:\n    decay: 0.1\n" in shown
    assert "callbacks" not in trainctl("config", "show", *chosen, "callbacks=[]").stdout


def test_a_recipe_chooses_callbacks(trainctl) -> None:
    (trainctl.folder / "recipes").mkdir()
    chosen = "defaults: [tiny, override /callbacks: [smoothed], _self_]\n"
    recipe = trainctl.folder / "recipes" / "mine.yaml"
    recipe.write_text(f"{chosen}callbacks: {{smoothed: {{decay: 0.2}}}}\n")
    assert "decay: 0.2" in trainctl("config", "show", "recipe=mine").stdout
    again = trainctl("config", "show", "recipe=mine", "callbacks=[smoothed]")
    assert "decay: 0.2" in again.stdout and not again.stderr
    assert "callbacks" not in trainctl("config", "show", "recipe=mine", "callbacks=[]").stdout
    recipe.write_text(chosen.replace("smoothed", "smothed"))
    wrong = trainctl("validate", "recipe=mine", expect=2)
    assert "did you mean callbacks=[smoothed]?" in wrong.stderr


def test_a_callback_is_called_and_keeps_its_state(trained: Trained) -> None:
    means = {}
    for run in (trained.run, trained.whole):
        records = map(json.loads, (run / "events.jsonl").read_text().splitlines())
        found = [each for each in records if each["event"] == "callback"]
        means[run] = [(each["step"], each["values"]["loss"]) for each in found]
    assert [step for step, _ in means[trained.run]] == [1, 2, 3, 4]
    assert means[trained.run] == means[trained.whole]
    plan = json.loads((trained.run / "attempts" / "1" / "plan.json").read_text())
    assert plan["config"]["callbacks"] == {"smoothed": {"decay": 0.5}}


def write_texts(folder: Path) -> Path:
    """Write a folder of fortunes, 20 in each of four files."""
    texts = folder / "texts"
    texts.mkdir()
    for file in "abcd":
        each = [f"{file} {number}:\n" + f"{file}{number} " * 100 for number in range(20)]
        (texts / f"{file}.fortunes").write_text("\n%\n".join(each))
    return texts


def test_an_objective_is_trained_on_and_records_what_it_measures(trained: Trained) -> None:
    """The focal loss is below the cross entropy of a guess, because likely tokens count less."""
    assert 0 < steps(trained.whole)[1] < 0.995 * math.log(264)
    records = read_events(trained.whole / "events.jsonl", "step")
    measured = [each["objective"] for each in records]
    assert len(measured) == 4 and all(0 <= each["sure"] <= 1 for each in measured)
    chosen = ("validate", "recipe=tiny", "objective=focal")
    staged = trained.trainctl(*chosen, "parallelism.pipeline=2", "zero_stage=1", expect=2)
    assert "error[TC392]: parallelism.pipeline" in staged.stderr
    assert "objective.focus" in trained.trainctl(*chosen, "objective.focus=-1", expect=2).stderr


def test_a_data_source_has_keys_and_checks_of_its_own(trainctl, tmp_path: Path) -> None:
    texts = write_texts(tmp_path)
    wrong = trainctl("validate", "recipe=tiny", "data=fortune", expect=2)
    assert "did you mean data=fortunes?" in wrong.stderr
    schema = json.loads(trainctl("config", "schema", "data").stdout)
    assert schema["properties"]["divider"]["default"] == "%"
    chosen = ("validate", "recipe=tiny", "data=fortunes")
    unnamed = trainctl(*chosen, expect=2)
    assert "data.kind=fortunes needs data.paths" in unnamed.stderr
    assert "/path/to/*.fortunes" in unnamed.stderr
    chosen = (*chosen, "data.paths=[texts]")
    foreign = trainctl(*chosen, "data.text_key=body", expect=2)
    assert "there is no key data.text_key with data.kind=fortunes" in foreign.stderr
    (texts / "more.md").touch()
    left_out = trainctl(*chosen, "training.sequence_length=64")
    assert "4 of its files are read, and left out are 1 .md" in left_out.stderr
    (texts / "e.fortunes").touch()
    empty = trainctl(*chosen, expect=2)
    assert (
        "error[FORTUNES1]: data.paths: " in empty.stderr and "e.fortunes is empty" in empty.stderr
    )


def test_a_data_source_is_trained_on_and_found_again(trained: Trained) -> None:
    budget = json.loads(trained.trainctl("estimate-memory", *OWN, "--json").stdout)
    assert budget["components"]["optimizer_states"] > 0
    corpus = json.loads((trained.run / "corpus.json").read_text())
    assert (corpus["train"]["documents"], corpus["held_out"]["documents"]) == (72, 8)
    shown = trained.trainctl("data", "show", "run", "--samples", "0", "--json").stdout
    (passage, *_) = json.loads(shown)["samples"][0]["passages"]
    text = Path(passage["file"]).read_text().split("\n")[passage["line"] - 1]
    assert text.endswith(":") and Path(passage["file"]).parent == trained.run.parent / "texts"
    separated = ("data.divider=--", "training.steps=6")
    changed = trained.trainctl("resume", "run", *separated, expect=5)
    assert "the corpus is not the one that this run started with" in changed.stderr


def test_a_launcher_has_keys_and_checks_of_its_own(trainctl) -> None:
    chosen = ("validate", "recipe=tiny", "launcher=fleet")
    foreign = trainctl(*chosen, "launcher.hosts=[a]", expect=2)
    assert "there is no key launcher.hosts with launcher.kind=fleet" in foreign.stderr
    nodes = ("hardware=2x2xcpu", "training.gradient_accumulation_steps=null")
    small = trainctl(*chosen, *nodes, expect=2)
    assert "error[TC077]: launcher.fleet_size: launcher.fleet_size=1, and" in small.stderr
    trainctl(*chosen, *nodes, "launcher.fleet_size=2")
    assert "name is taken" in trainctl(*chosen, "launcher.fleet_name=taken", expect=2).stderr


def test_a_launcher_starts_a_run_and_resumes_it(trained: Trained) -> None:
    shown = json.loads(trained.trainctl("launch", *OWN, "--dry-run", "--json").stdout)
    assert "trainctl.launchers.agent" in shown["commands"][0]
    assert trained.fleets == ("3", "4")
    rows = json.loads(trained.trainctl("runs", "ls", ".", "--json").stdout)["runs"]
    assert len(rows) >= 2 and {row["launcher"] for row in rows} == {"fleet"}


def test_a_family_has_keys_and_checks_of_its_own(trainctl) -> None:
    wrong = trainctl("validate", "recipe=tiny", "model=granit", expect=2)
    assert "did you mean model=granite?" in wrong.stderr
    schema = json.loads(trainctl("config", "schema", "model").stdout)
    assert schema["properties"]["residual_multiplier"]["default"] == 1.0
    assert "granite" in schema["properties"]["family"]["anyOf"][0]["enum"]
    foreign = trainctl("validate", "recipe=tiny", "model.residual_multiplier=0.5", expect=2)
    assert "there is no key model.residual_multiplier with model.family=llama" in foreign.stderr
    chosen = ("validate", "recipe=tiny", "model=granite")
    assert "must be above 0" in trainctl(*chosen, "model.logits_scaling=0", expect=2).stderr
    staged = trainctl(*chosen, "zero_stage=1", "parallelism.pipeline=2", expect=2)
    assert "each stage would multiply what it gets" in staged.stderr
    for refused in (("model.mup=true", "model.mup_base_width=64"), ("kernels.liger=true",)):
        assert "granite" in trainctl(*chosen, *refused, expect=2).stderr
    trainctl(*chosen)


def test_a_directory_is_of_a_family_from_outside(trainctl, tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    shape = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    said = {"model_type": "granite", "vocab_size": 264, **shape, "residual_multiplier": 0.22}
    file = tmp_path / "published" / "config.json"
    file.write_text(json.dumps(said))
    chosen = ("config", "show", "recipe=tiny", "model=hf", "model.path=published")
    shown = trainctl(*chosen).stdout
    assert "family: granite" in shown and "residual_multiplier: 0.22" in shown
    assert "attention_multiplier: 1.0" in shown  # what transformers takes where the file has none
    file.write_text(json.dumps({**said, "attention_bias": True}))
    assert "family: hf" in trainctl(*chosen).stdout


def test_a_familys_budget_is_what_a_trace_of_its_code_finds(trainctl) -> None:
    chosen = ("estimate-memory", "recipe=tiny", "model=granite", "--json")
    closed, traced = (json.loads(trainctl(*chosen, *exact).stdout) for exact in ((), ("--exact",)))
    assert closed["components"] == traced["components"]
    assert closed["checkpoint_bytes"] == traced["checkpoint_bytes"]


def test_a_family_is_saved_and_exported(trained: Trained) -> None:
    for checkpoint in (trained.run / "checkpoints").glob("step-*"):
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        assert manifest["model"]["configuration"]["residual_multiplier"] == 0.22
    factor = "model.residual_multiplier=1"
    changed = trained.trainctl("resume", "run", factor, "training.steps=6", expect=5)
    assert "model.residual_multiplier was 0.22, and is 1.0" in changed.stderr
    trained.trainctl("export", "run", "exported")
    exported = json.loads((trained.run.parent / "exported" / "config.json").read_text())
    assert exported["logits_scaling"] == 4.0


def test_a_mode_and_a_number_format_have_checks_of_their_own(trainctl) -> None:
    chosen = ("validate", "recipe=tiny", *MODES)
    too_many = trainctl(*chosen, "precision.places=9", expect=2)
    assert "nearest legal value: 8" in too_many.stderr
    foreign = trainctl(*chosen, "precision.loss_scale=8", expect=2)
    assert "there is no key precision.loss_scale with precision.compute=rounded" in foreign.stderr
    compiled = trainctl(*chosen, "kernels.compile=blocks", expect=2)
    assert "the mark would be compiled away" in compiled.stderr
    lowered = trainctl(*chosen, "precision.autocast=true", expect=2)
    assert "precision.autocast needs bf16, and precision.compute is rounded" in lowered.stderr


def test_a_mode_and_a_number_format_are_in_the_budget(trainctl) -> None:
    peaks = {}
    for modes in (MODES, ("activation_checkpointing=full", "precision=bf16")):
        shown = trainctl("estimate-memory", "recipe=7b-zero3", *modes, "--json")
        peaks[modes] = json.loads(shown.stdout)["components"]
    assert len({json.dumps(each) for each in peaks.values()}) == 1


def test_a_number_format_is_trained_with(trained: Trained) -> None:
    """It is bf16 and something more, which the curve shows."""
    trained.trainctl("launch", *OWN, "precision=bf16", "--run-dir", "plain")
    plain = steps(trained.run.parent / "plain")
    assert list(plain) == [1, 2, 3, 4] and plain != steps(trained.whole)
