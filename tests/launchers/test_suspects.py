"""Spikes are traced to the documents that carry them, by leaving halves of a batch out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainctl as tc
from trainctl.cli.main import run as command
from trainctl.config import registry
from trainctl.errors import ExitCode
from trainctl.launchers.suspects import SuspectDocument, Suspects, spike_of
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import EventWriter
from trainctl.train.callbacks.document_search import CarrierSearch, search_carriers

OWN = Path(__file__).parents[1] / "support" / "own_options"
NAN = float("nan")


def searched(values: np.ndarray[Any, Any], most: int = 8) -> tuple[CarrierSearch, int]:
    """Search units whose excess adds up; return the result and the number of measurements."""
    calls = 0

    def excess(part: np.ndarray[Any, Any]) -> float:
        nonlocal calls
        calls += 1
        found = float(values[part].sum())
        return found if math.isfinite(found) else math.inf

    units = np.arange(len(values))
    return search_carriers(excess, units, excess(units), most), calls


@pytest.mark.parametrize("place", [0, 1, 2047, 2048, 4095])
def test_one_of_4096_takes_14_measurements(place: int) -> None:
    values = np.full(4096, 1e-6)
    values[place] = 1.0
    found, calls = searched(values)
    assert [unit for unit, _ in found.found] == [place]
    assert calls == 14
    assert found.left == pytest.approx(4095e-6)


def test_several_are_found_one_after_the_other() -> None:
    values = np.zeros(1000)
    values[[3, 4, 700]] = 1.0, 0.6, 0.8
    found, _ = searched(values)
    assert sorted(unit for unit, _ in found.found)[-1] == 700
    assert found.left <= 1.2  # half of the whole
    values[[3, 4, 700]] = NAN, 0.0, NAN
    found, _ = searched(values)
    assert {unit for unit, _ in found.found} == {3, 700}
    assert searched(values, most=1)[0].left == math.inf


def test_what_all_carry_is_carried_by_none() -> None:
    for count in (8, 4096):
        found, calls = searched(np.full(count, 1.0))
        assert found.found == [] and calls <= math.log2(count) + 3
    mixed = np.full(4096, 0.1)
    mixed[100:200] = 10.0  # a hundred of them
    found, _ = searched(mixed)
    assert found.found == []
    assert set(found.narrowest.tolist()) <= set(range(512)) and len(found.narrowest) <= 512


def recorded(folder: Path, losses: list[float], *, stopped: float | None = None) -> RunPaths:
    """Return a run with these losses, perhaps stopped by a bad one at the next step."""
    run = RunPaths(folder)
    run.root.mkdir(parents=True)
    with EventWriter(run.events, 1) as events:
        for step, loss in enumerate(losses, 1):
            events.write("step", step=step, loss=loss, grad_norm=1.0, samples=[step, step + 1])
        if stopped is not None:
            kind = "loss_spike" if math.isfinite(stopped) else "loss_not_finite"
            at = {"step": len(losses) + 1, "kind": kind, "value": stopped, "policy": "stop"}
            events.write("intervention", **at)
    return run


def test_the_spike_is_the_one_in_the_records(tmp_path: Path) -> None:
    usual = [2.0, 2.1, 1.9, 2.0, 2.05]
    spike = spike_of(recorded(tmp_path / "a", [*usual, 9.0]), 6, None)
    assert (spike.by, spike.value, spike.usual, spike.steps) == ("loss", 9.0, 2.03125, 5)
    assert str(spike) == "loss 9, by the trend of the 5 steps before: 2.03125"
    for stopped in (9.0, NAN):
        spike = spike_of(recorded(tmp_path / f"b{stopped}", usual, stopped=stopped), 6, None)
        assert spike.by == "loss" and spike.deviations > 10
    for losses, step, words in (
        ([*usual, 2.1], 6, "step 6 is no spike: loss 2.1"),
        (usual, 3, "no value of step 3 to compare with at least 4 steps before"),
        (usual, 9, "no value of step 9"),
    ):
        with pytest.raises(tc.TrainctlError, match=words):
            spike_of(recorded(tmp_path / f"c{step}", losses), step, None)


def test_a_spike_stands_out_from_a_loss_that_falls(tmp_path: Path) -> None:
    falling = [5.0 - 0.1 * step + 0.01 * (step % 2) for step in range(32)]
    spike = spike_of(recorded(tmp_path / "a", [*falling, 2.6]), 33, None)
    assert spike.usual == pytest.approx(1.8, abs=0.02) and spike.deviations > 3
    slight = recorded(tmp_path / "b", [*falling, 1.82])
    with pytest.raises(tc.TrainctlError, match="is no spike") as refused:
        spike_of(slight, 33, None)
    assert "--force" in str(refused.value.hint)
    assert 0 < spike_of(slight, 33, None, force=True).deviations < 3
    below = recorded(tmp_path / "c", [*falling, 1.5])  # carried by no document
    with pytest.raises(tc.TrainctlError, match="is no spike"):
        spike_of(below, 33, "loss", force=True)


def test_what_is_not_explained_is_said() -> None:
    found: dict[str, Any] = {
        "run": "r",
        "step": 7,
        "checkpoint": 5,
        "by": "loss",
        "recorded": 9.0,
        "usual": 2.0,
        "replayed": 9.0,
        "left": 9.0,
        "is_reproduced": True,
        "documents": (),
        "units": 4096,
        "replays": 14,
        "narrowest": (512, 40, 71),
    }
    spread = Suspects(**found)
    assert spread.sentence.startswith("no document carries it alone: the loss of step 7 is 9 by")
    assert "more than half of it is in 512 documents (samples 40 to 71)" in spread.sentence
    gone = Suspects(**{**found, "replayed": 2.1, "left": 2.1, "is_reproduced": False})
    assert "trainctl trial RUN --step 7" in gone.sentence
    assert spread.exit_code == gone.exit_code == ExitCode.training_failed
    one = SuspectDocument(
        "", 0, None, None, start=0, end=9, sample=40, labels=9, share=None, text=""
    )
    endless = {**found, "replayed": math.inf, "left": math.inf, "documents": (one,)}
    assert not Suspects(**endless).is_good  # others give no finite number either
    assert json.loads(json.dumps(spread.to_dict()))["verdict"] == "not explained"


LENGTH, SAMPLES, STEPS, AT = 138, 60, 12, 11
POISONED = 37
"""Sample of the step with the poisoned document, behind 24 documents of the other kind."""


def write_corpus(folder: Path) -> None:
    """Write documents of one letter, and one of 89 others: 4,096 in each batch."""
    letters = np.random.default_rng(1).choice(list("abcdefgh"), STEPS * LENGTH * SAMPLES // 2)
    place = ((AT - 1) * SAMPLES + POISONED) * LENGTH // 2 + 24
    documents = [*letters[:place], "z" * 89, *letters[place + 45 :]]
    for name, texts in (("train", documents), ("held", letters[:1000])):
        lines = "".join(json.dumps({"text": str(text)}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(lines)


OVERRIDES = (
    "recipe=tiny",
    "hardware=2xcpu",
    f"training.sequence_length={LENGTH}",
    f"training.global_batch_size={SAMPLES}",
    "training.micro_batch_size=10",
    "training.evaluation_samples=4",
    "training.evaluate_every_steps=null",
    "training.sample_tokens=0",
    f"training.steps={STEPS}",
    "checkpoint.every_steps=9",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.head_dim=8",
    "model.intermediate_size=64",
    "optimizer.lr=0.1",
    "schedule=constant",
    "schedule.warmup_steps=0",
    "data=files",
    "data.paths=[train.jsonl]",
    "data.held_out_paths=[held.jsonl]",
    "data.shuffle=false",
    "data.mask_documents=true",
)


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
def test_a_poisoned_document_is_named_and_the_devices_do_not_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    tc.launch(*OVERRIDES, run_dir="run")
    assert command(["data", "suspects", "run", "--step", str(AT), "--json"]) == 0
    out, messages = capsys.readouterr()
    found = json.loads(out)
    assert (found["units"], found["replays"], found["is_reproduced"]) == (4096, 14, True)
    (document,) = found["documents"]
    assert document["text"] == "z" * 89
    assert document["sample"] == (AT - 1) * SAMPLES + POISONED
    line = (tmp_path / "train.jsonl").read_text().splitlines().index('{"text": "%s"}' % ("z" * 89))
    assert (document["document"], document["line"]) == (line, line + 1)
    assert Path(document["file"]).name == "train.jsonl"
    assert document["share"] > 0.7 and found["left"] < 0.3 * found["replayed"]
    assert "replaying 1 step after step 9, then step 11" in messages
    assert "by the trend of the 10 steps before" in messages
    assert command(["trial", "run", "--step", str(AT)]) == 0
    out, _ = capsys.readouterr()
    assert "no device differs: 2 ranks, 2 shares of step 11, each on 2 devices" in out
    monkeypatch.setenv(registry.FOLDER_VARIABLE, str(OWN))
    for cache in (registry.list_kinds, registry.load_spec):
        cache.cache_clear()
    own = tmp_path / "conf" / "callbacks" / "broken_device.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("fault: late\nbroken_rank: 1\n")
    code = command(["trial", "run", "callbacks=[broken_device]", "--step", str(AT)])
    for cache in (registry.list_kinds, registry.load_spec):
        cache.cache_clear()
    out, err = capsys.readouterr()
    assert code == ExitCode.training_failed, err
    assert "differs from the others: rank 1 (host" in out and "changed without an update" in out
    assert "leave device 1 out (CUDA_VISIBLE_DEVICES), with hardware.devices_per_node=1" in out
    assert command(["data", "suspects", "run", "--step", str(STEPS)]) == ExitCode.bad_input
    assert "step 12 is no spike" in capsys.readouterr().err
    assert command(["trial", "run", "--step", "99"]) == ExitCode.bad_input
    assert "the run has the steps 1 to 12" in capsys.readouterr().err
    verdicts = [json.loads(path.read_text())["verdict"] for path in Path("run/proofs").iterdir()]
    assert sorted(verdicts) == ["explained", "named", "no difference"]
    assert not list(tmp_path.glob(".replay-*"))
