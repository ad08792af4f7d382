"""The z-loss, in every way that a loss is computed, against plain torch."""

import pytest
from plain_torch import plain_torch
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases

from trainctl.config.schema import CrossEntropyKind
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events

STEPS, WEIGHT = 3, 0.02


def penalized(z_loss=WEIGHT, kind=CrossEntropyKind.plain, **axes):
    own = {f"parallelism__{axis}": size for axis, size in axes.items()}
    if kind is CrossEntropyKind.chunked:
        own["kernels__chunk_tokens"] = 100  # the last chunk is shorter
    return tiny_config(
        steps=STEPS,
        precision__compute="fp32",
        optimizer__lr=1e-3,
        schedule__kind="constant",
        schedule__warmup_steps=0,
        checkpoint__at_end=False,
        stability__z_loss=z_loss,
        kernels__cross_entropy=kind,
        **own,
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return plain_torch(penalized(), tmp_path_factory.mktemp("plain") / "run", steps=STEPS)


PATHS = {
    "data": (2, {}),
    "chunked-tensor": (2, {"kind": CrossEntropyKind.chunked, "tensor": 2}),
    "chunked": (1, {"kind": CrossEntropyKind.chunked}),
    "tensor": (2, {"tensor": 2}),
    "sequence": (2, {"sequence": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "none": (1, {"z_loss": 0.0}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of all paths, by name."""
    folder = tmp_path_factory.mktemp("paths")
    for processes in (1, 2):
        cases = [
            Case(tiny_plan(penalized(**changes), size), RunPaths(folder / name))
            for name, (size, changes) in PATHS.items()
            if size == processes
        ]
        train_cases(processes, cases, together=True)
    return {name: RunPaths(folder / name) for name in PATHS}


@pytest.mark.parametrize("path", [name for name in PATHS if name != "none"])
def test_every_path_of_the_loss(runs, reference, path):
    run = runs[path]
    steps = [event for event in read_events(run.events) if event["event"] == "step"]
    assert [event["z_loss"] for event in steps] == pytest.approx(reference.z_losses, rel=1e-5)
    for step, (loss, norm) in curve(run).items():
        assert (loss, norm) == pytest.approx(reference.curve[step], rel=2e-5)
    # An evaluation is of the cross entropy alone: the z-loss is six tenths of a nat here.
    (held_out,) = [event for event in read_events(run.events) if event["event"] == "evaluation"]
    assert abs(held_out["loss"] - steps[-1]["loss"]) < 0.3 < reference.z_losses[0]


def test_it_changes_the_curve_and_without_it_nothing_is_recorded(tmp_path, runs, reference):
    plain = plain_torch(penalized(z_loss=0.0), tmp_path / "plain", steps=STEPS)
    assert abs(plain.curve[STEPS][0] - reference.curve[STEPS][0]) > 2e-4
    assert all("z_loss" not in event for event in read_events(runs["none"].events))
    for step, (loss, norm) in curve(runs["none"]).items():
        assert (loss, norm) == pytest.approx(plain.curve[step], rel=2e-5)
