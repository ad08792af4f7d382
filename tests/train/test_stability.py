"""Batches that spoil a run, on real ranks: what each policy leaves of it, at every ZeRO stage.

A run that recovered must be, bit for bit, one that never had the samples it passed over.
"""

import re
from functools import partial

import pytest
from parity_cases import enlarge
from poison import NAN, Poisoned, train_poisoned
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, with_stop

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.registry import new_section
from trainctl.config.schema import DataType, OffloadDevice, OnBadLoss, RunConfig
from trainctl.errors import ExitCode
from trainctl.runs.checkpoints import list_checkpoints
from trainctl.runs.event_descriptions import describe_intervention
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import verify
from trainctl.runs.records import read_events

BATCH, STEPS = 8, 6
NAN_EVERYWHERE, LARGE, NAN_ON_ONE = 2, 4, 5
"""Numbers of the spoilt batches, from 0."""
POISON = (
    *((NAN_EVERYWHERE * BATCH + sample, NAN) for sample in range(BATCH)),
    *((LARGE * BATCH + sample, 10.0) for sample in range(BATCH)),
    (NAN_ON_ONE * BATCH + 2, NAN),  # of rank 1, in the first of two micro-batches
)
BAD = (NAN_EVERYWHERE, LARGE, NAN_ON_ONE)
IN_LOSS = ["loss_not_finite", "loss_spike", "loss_not_finite"]
IN_GRADIENT = ["norm_not_finite", "norm_spike", "norm_not_finite"]


def plan(stage, compute, policy, **settings):
    config = tiny_config(steps=STEPS, evaluation_samples=0, sequence_length=32)
    config.model.num_layers = 2
    config.zero_stage.stage = stage
    config.precision.compute = compute
    config.schedule = new_section("schedule", "constant", warmup_steps=0)
    config.stability.on_bad_loss = policy
    config.stability.spike_factor = 2.0
    config.stability.norm_spike_factor = 4.0
    config.stability.spike_after_steps = 2
    config.checkpoint.every_steps = 2
    changed = to_plain(config)
    for key, value in settings.items():
        section, _, name = key.partition("__")
        changed[section][name] = to_plain(value)
    config = from_plain(RunConfig, changed)
    if config.offload.nvme_path is not None:
        enlarge(config)
    return tiny_plan(config, 2)


def events(run, kind):
    return [event for event in read_events(run.events) if event["event"] == kind]


def assert_recovers(folder, made, policy, *, gradient_only=False):
    """Train it poisoned, and beside it the run that it should come to."""
    spoilt, clean = RunPaths(folder / "spoilt"), RunPaths(folder / "clean")
    outcomes = train_poisoned(
        Poisoned(made(policy), spoilt, poison=POISON, gradient_only=gradient_only)
    )
    assert [outcome.error for outcome in outcomes] == ["", ""]
    assert all(outcome.is_finite for outcome in outcomes)
    if made(policy).mesh.data == 2:
        assert len({outcome.digest for outcome in outcomes}) == 1

    missing = tuple((number * BATCH, (number + 1) * BATCH) for number in BAD)
    to_step = [None] * 3
    if policy is OnBadLoss.rewind:  # and what led up to them, since the checkpoint of step 2
        to_step = [2] * 3
        missing = ((NAN_EVERYWHERE * BATCH, (NAN_ON_ONE + 1) * BATCH),)
    expected = train_poisoned(Poisoned(made(OnBadLoss.stop), clean, missing=missing))
    found = curve(spoilt)
    if policy is OnBadLoss.skip_step:  # these steps count
        updates = [found[step] for step in range(1, STEPS + 1) if step - 1 not in BAD]
        assert updates == list(curve(clean).values())[: len(updates)]
    else:
        assert found == curve(clean)
        assert [one.digest for one in outcomes] == [one.digest for one in expected]

    noted = events(spoilt, "intervention")
    assert [event["kind"] for event in noted] == (IN_GRADIENT if gradient_only else IN_LOSS)
    assert {event["policy"] for event in noted} == {policy.value}
    assert [event["samples"] for event in noted] == [[n * BATCH, n * BATCH + BATCH] for n in BAD]
    assert [event.get("to_step") for event in noted] == to_step
    if not gradient_only:
        assert [event["ranks"] for event in noted] == [[0, 1], [0, 1], [1]]
        assert NAN_ON_ONE * BATCH + 2 in noted[2]["suspects"]
        assert not {NAN_ON_ONE * BATCH, NAN_ON_ONE * BATCH + 1} & set(noted[2]["suspects"])


QUICK = (
    (0, DataType.bf16, OnBadLoss.skip_batch),
    (1, DataType.fp32, OnBadLoss.skip_step),
    (2, DataType.bf16, OnBadLoss.skip_step),
    (3, DataType.fp32, OnBadLoss.rewind),
)
"""Every stage, both formats and all policies."""
OTHER = (
    (0, DataType.fp32, OnBadLoss.rewind),
    (1, DataType.bf16, OnBadLoss.rewind),
    (2, DataType.fp32, OnBadLoss.skip_batch),
    (3, DataType.bf16, OnBadLoss.skip_batch),
    (0, DataType.fp32, OnBadLoss.skip_step),
    (1, DataType.bf16, OnBadLoss.skip_batch),
    (2, DataType.fp32, OnBadLoss.rewind),
    (3, DataType.bf16, OnBadLoss.skip_step),
)
"""Cases that give each stage all three policies, and cover all pairs of policy and format."""


@pytest.mark.parametrize(("stage", "compute", "policy"), QUICK)
def test_a_spoilt_run_is_the_run_without_what_spoilt_it(tmp_path, stage, compute, policy):
    assert_recovers(tmp_path, partial(plan, stage, compute), policy)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "compute", "policy"), OTHER)
def test_every_policy_at_each_zero_stage(tmp_path, stage, compute, policy):
    assert_recovers(tmp_path, partial(plan, stage, compute), policy)


@pytest.mark.parametrize(
    ("stage", "policy"),
    [(1, OnBadLoss.rewind), pytest.param(2, OnBadLoss.skip_batch, marks=pytest.mark.slow)],
)
def test_fp32_gradients_of_bf16_weights_leave_no_trace_either(tmp_path, stage, policy):
    """They are added up in buffers that outlive a step; stage 1 has a wrapper of its own for it."""
    made = partial(plan, stage, DataType.bf16, precision__gradient_accumulation=DataType.fp32)
    assert_recovers(tmp_path, made, policy)


def test_a_gradient_alone_may_be_bad(tmp_path):
    made = partial(plan, 2, DataType.bf16)
    assert_recovers(tmp_path, made, OnBadLoss.skip_batch, gradient_only=True)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "policy"), [(3, OnBadLoss.rewind), (2, OnBadLoss.skip_batch)])
def test_every_policy_under_fsdp2(tmp_path, stage, policy):
    made = partial(plan, stage, DataType.bf16, engine__kind="fsdp2")
    assert_recovers(tmp_path, made, policy)


HOST = {"offload__optimizer": OffloadDevice.cpu}
CHANGES = {
    "tensor": {"parallelism__tensor": 2},
    "pipeline": {"parallelism__pipeline": 2},
    "sequence": {"parallelism__sequence": 2},
    "host": HOST,
    "all on host": {**HOST, "offload__parameters": OffloadDevice.cpu},
}


@pytest.mark.slow
@pytest.mark.timeout(1800)  # DeepSpeed compiles CPUAdam when it is first used
@pytest.mark.parametrize(
    ("stage", "change", "policy"),
    [
        (1, "tensor", OnBadLoss.skip_batch),
        (3, "tensor", OnBadLoss.rewind),
        (1, "pipeline", OnBadLoss.skip_batch),
        (1, "pipeline", OnBadLoss.rewind),
        (2, "sequence", OnBadLoss.skip_batch),
        (2, "host", OnBadLoss.rewind),
        (3, "host", OnBadLoss.skip_batch),
        (3, "all on host", OnBadLoss.rewind),
    ],
)
def test_other_layouts_and_offload_recover_too(tmp_path, stage, change, policy):
    made = partial(plan, stage, DataType.fp32, **CHANGES[change])
    assert_recovers(tmp_path, made, policy, gradient_only=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # and what reads and writes the drive, which takes minutes
@pytest.mark.parametrize("policy", [OnBadLoss.skip_batch, OnBadLoss.rewind])
def test_so_do_states_on_nvme(tmp_path, policy):
    made = partial(
        plan,
        3,
        DataType.fp32,
        offload__optimizer=OffloadDevice.nvme,
        offload__nvme_path=str(tmp_path / "nvme"),
    )
    assert_recovers(tmp_path, made, policy, gradient_only=True)


def spoil(numbers, factor=NAN):
    """Poison in every sample of some batches."""
    return tuple((n * BATCH + sample, factor) for n in numbers for sample in range(BATCH))


def ends(folder, poison, *, stage=1, compute=DataType.fp32, policy=OnBadLoss.stop, **changes):
    """Train a poisoned run and return its error message, which must be the same on both ranks."""
    run = RunPaths(folder)
    made = plan(stage, compute, policy, **changes)
    outcomes = train_poisoned(Poisoned(made, run, poison=poison))
    assert all(outcome.is_finite for outcome in outcomes)
    assert len({(outcome.error, outcome.exit_code, outcome.digest) for outcome in outcomes}) == 1
    assert outcomes[0].exit_code == (ExitCode.training_failed if outcomes[0].error else 0)
    return run, outcomes[0].error


@pytest.mark.parametrize(("stage", "compute"), [(0, DataType.bf16), (3, DataType.fp32)])
def test_without_a_policy_it_stops_and_keeps_its_last_good_checkpoint(tmp_path, stage, compute):
    run, error = ends(tmp_path, spoil([2]), stage=stage, compute=compute)
    told, _, found = error.partition("; ")
    assert told == "the loss of step 3 is nan (samples 16 to 24, seen by rank 0, 1)"
    assert found.startswith("weights are finite, and so is all")
    assert [info.step for info in list_checkpoints(run)] == [2]
    assert verify(list_checkpoints(run)[0].path) == []
    assert list(curve(run)) == [1, 2]
    (event,) = events(run, "intervention")
    assert (event["policy"], event["step"], event["in_a_row"]) == ("stop", 3, 0)


def test_a_spike_stops_too_where_one_is_looked_for(tmp_path):
    _, error = ends(tmp_path, spoil([4], 10.0))
    assert re.fullmatch(
        r"the loss of step 5 is 5\d\.\d+, above 10\.\d+ \(samples 32 to 40, .*", error
    )


def test_it_stops_after_too_many_in_a_row(tmp_path):
    run, error = ends(
        tmp_path, spoil([2, 3, 4]), policy=OnBadLoss.skip_batch, stability__max_interventions=2
    )
    assert "step 3 is nan (samples 32 to 40, seen by rank 0, 1), after 2 interventions" in error
    assert [event["policy"] for event in events(run, "intervention")] == ["skip_batch"] * 2 + [
        "stop"
    ]
    assert [info.step for info in list_checkpoints(run)] == [2]


def test_a_document_that_all_bad_batches_have_is_named(tmp_path):
    texts = {"long": "a long one, a hundred thousand bytes of it. " * 2500, "short": "brief"}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    config = plan(1, DataType.fp32, OnBadLoss.skip_batch, stability__max_interventions=2).config
    files = [str(tmp_path / f"{name}.txt") for name in texts]
    config.data = new_section("data", "files", paths=files[:1], held_out_paths=files[1:])
    run = RunPaths(tmp_path / "run")
    outcomes = train_poisoned(Poisoned(tiny_plan(config, 2), run, poison=spoil([2, 3, 4])))
    found = [event.get("document") for event in events(run, "intervention")]
    assert found[:2] == [None, None]
    assert found[2]["file"] == files[0] and found[2]["document"] == 0 and found[2]["batches"] == 3
    assert {outcome.error for outcome in outcomes} == {outcomes[0].error}
    assert "all 3 bad batches in a row have parts of one document" in outcomes[0].error
    assert files[0] in outcomes[0].error and "raise stability.max_interventions" in outcomes[0].hint
    assert f"trainctl data suspects {run.root} --step " in outcomes[0].hint  # a name alone is none


def test_it_stops_where_there_is_nothing_to_go_back_to(tmp_path):
    _, error = ends(tmp_path, spoil([2]), policy=OnBadLoss.rewind, checkpoint__every_steps=4)
    assert "and there is no checkpoint to go back to yet; weights are finite" in error


def test_a_warning_goes_on_and_makes_the_update(tmp_path):
    run, error = ends(tmp_path / "warned", spoil([4], 10.0), policy=OnBadLoss.warn)
    blind, _ = ends(
        tmp_path / "blind",
        spoil([4], 10.0),
        stability__spike_factor=None,
        stability__norm_spike_factor=None,
    )
    assert error == "" and curve(run) == curve(blind)
    (event,) = events(run, "intervention")
    assert (event["kind"], event["policy"], event["step"]) == ("loss_spike", "warn", 5)


@pytest.mark.parametrize(
    "policy", [OnBadLoss.rewind, pytest.param(OnBadLoss.skip_batch, marks=pytest.mark.slow)]
)
def test_a_crash_between_interventions_leaves_the_same_run(tmp_path, policy):
    """The attempt ends after the first intervention without a checkpoint, so the next attempt
    repeats it.
    """
    made = plan(1, DataType.fp32, policy, checkpoint__at_end=False)
    whole, parts = RunPaths(tmp_path / "whole"), RunPaths(tmp_path / "parts")
    train_poisoned(Poisoned(made, whole, poison=POISON))
    train_poisoned(Poisoned(with_stop(made, 3), parts, poison=POISON))
    assert len(events(parts, "intervention")) == 1
    train_poisoned(Poisoned(made, parts, attempt=2, poison=POISON))
    assert curve(parts) == curve(whole)
    again = [event for event in events(parts, "intervention") if event["attempt"] == 2]
    keys = ("step", "kind", "value", "samples", "in_a_row", "policy")
    assert [[event[key] for key in keys] for event in again] == [
        [event[key] for key in keys] for event in events(whole, "intervention")
    ]
    replayed = events(parts, "replay")
    assert [event["step"] for event in replayed] == [3]
    assert replayed[0]["loss"] == replayed[0]["expected"]


def test_a_learning_rate_that_is_far_too_high_is_reported_without_a_policy(tmp_path):
    config = tiny_config(steps=24, evaluation_samples=0, sequence_length=32)
    config.optimizer.lr = 5.0
    config.schedule = new_section("schedule", "constant", warmup_steps=0)
    config.checkpoint.at_end = False
    run = RunPaths(tmp_path / "run")
    train_cases(1, [Case(tiny_plan(config, 1), run)])
    (told,) = events(run, "divergence")
    assert told["diverged"] and told["reference"] == "vocabulary"
    assert told["loss"] > told["limit"] and told["learning_rate"] == 5.0
    assert not events(run, "intervention")
    assert events(run, "end")[0]["reason"] == "complete"


STRUCK = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("stage", "struck", "changes"),
    [
        (1, "weight", {}),
        (3, "weight", {}),
        (3, "activation", {}),
        (2, "gradient", {}),
        pytest.param(1, "weight", {"parallelism__tensor": 2}, marks=pytest.mark.slow),
        pytest.param(1, "activation", {"parallelism__pipeline": 2}, marks=pytest.mark.slow),
        pytest.param(3, "weight", {"engine__kind": "fsdp2"}, marks=pytest.mark.slow),
        pytest.param(3, "activation", {"engine__kind": "fsdp2"}, marks=pytest.mark.slow),
    ],
)
def test_what_holds_the_nan_is_named(tmp_path, stage, struck, changes):
    run = RunPaths(tmp_path / "run")
    made = plan(stage, DataType.fp32, OnBadLoss.stop, **changes)
    outcomes = train_poisoned(Poisoned(made, run, struck=f"{struck} {STRUCK}"))
    assert len({outcome.error for outcome in outcomes}) == 1
    (event,) = events(run, "intervention")
    assert event["kind"] == ("norm_not_finite" if struck == "gradient" else "loss_not_finite")
    found = event["not_finite"]
    assert found["in"] == struck and found["ranks"]
    if struck == "weight":  # one element of it, which one rank holds where it is partitioned
        assert found["names"] == [f"{STRUCK}.weight"] and found["count"] == 1
        assert "data show" not in outcomes[0].hint and "by an earlier update" in outcomes[0].error
        assert len(found["ranks"]) == 1
    elif struck == "activation":
        assert found["names"] == [f"{STRUCK} (Linear)"]
    else:
        assert f"{STRUCK}.weight" in found["names"]
        assert not any("layers.2" in name or "model.norm" in name for name in found["names"])
    assert STRUCK in describe_intervention(event)
