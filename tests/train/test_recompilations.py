"""What torch compiles after the first steps is recorded, with its reason."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rank_processes import Case, tiny_config, tiny_plan, train_cases

from trainctl.cli.record_lines import record_lines
from trainctl.config.schema import CompileKind, StageConfig
from trainctl.monitor.report.marks import mark_of
from trainctl.runs.event_descriptions import describe_recompilation, last_recompilation
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.callbacks.context import StepState
from trainctl.train.callbacks.recompilations import Recompilations, recompilations_of


class Journal:
    def __init__(self):
        self.events = []

    def record(self, kind, **fields):
        self.events.append({"event": kind, "attempt": 1, "time": 0.0, **fields})


class Ranks:
    """This rank, and one that compiled nothing."""

    def gather(self, value):
        return [{}, value]


@pytest.fixture
def compiled():
    """Return a compiled function that is made anew for each shape, without a compiler for C++."""
    torch._dynamo.reset()
    return torch.compile(lambda tensor: tensor.sin() + 1, dynamic=False, backend="eager")


@pytest.fixture
def steps():
    """Return a function that makes steps of the callback, and the journal."""
    now, journal = StepState(0), Journal()
    callback = Recompilations(Ranks(), now, journal)
    callback.on_train_start(None)

    def make(in_step, evaluation=None, after=None):
        now.step += 1
        now.made = SimpleNamespace(
            batch=SimpleNamespace(micro_batch_size=2, sequence_length=len(in_step))
        )
        make.function(in_step)
        callback.after_step(None)
        if evaluation is not None:
            make.function(evaluation)
            callback.on_evaluate(None)
        if after is not None:
            make.function(after)
        callback.after_agreement(None, callback.before_agreement(None))
        return journal.events

    return make


def test_a_shape_after_the_warmup_is_told_with_its_reason(compiled, steps):
    steps.function = compiled
    for _ in range(3):
        assert steps(torch.ones(8)) == []
    (event,) = steps(torch.ones(16))
    assert (event["event"], event["step"], event["part"]) == ("recompilation", 4, "step")
    assert event["ranks"] == [1] and event["graphs"] == 1 and event["seconds"] > 0
    assert event["reason"].endswith("size mismatch at index 0. expected 8, actual 16")
    assert not event["reason"][0].isdigit()
    assert (event["shape"], event["shape_before"]) == ([2, 16], [2, 8])
    assert not event["gave_up"] and event["times"] == 1
    assert len(steps(torch.ones(8))) == 1  # both are compiled by now
    _, second = steps(torch.ones(8), after=torch.ones(4))
    assert (second["part"], second["shape"], second["times"]) == ("after_step", None, 2)
    seconds = f"{event['seconds']:.3g} s"
    text = f"rank 1 compiled a graph anew for micro-batches of 2 x 16 instead of 2 x 8, {seconds}"
    assert describe_recompilation(event) == text
    assert record_lines(event, stop_step=9) == [f"step 4: {text}: {event['reason']}"]
    mark = mark_of(event, 4)
    assert mark is not None and (mark.text, mark.cause) == (text, event["reason"])
    assert ", after the step itself" in describe_recompilation(second)
    assert last_recompilation([event, second], 1) is second
    assert last_recompilation([event, second], 2) is None


def test_the_first_steps_and_the_first_evaluation_are_warmup(compiled, steps):
    steps.function = compiled
    steps(torch.ones(8))
    steps(torch.ones(16))
    steps(torch.ones(8))
    assert steps(torch.ones(8), evaluation=torch.ones(4)) == []
    (event,) = steps(torch.ones(8), evaluation=torch.ones(2))
    assert event["part"] == "after_step"


def test_a_compiler_that_gives_up_is_told_even_in_the_first_step(compiled, steps):
    steps.function = compiled
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled(torch.ones(4))
        (event,) = steps(torch.ones(8))
        assert steps(torch.ones(16)) == [event]  # torch asks no more
    assert event["gave_up"] and event["step"] == 1
    assert describe_recompilation(event) == (
        "torch has compiled blocks for as many shapes as it may on rank 1, and runs further ones "
        "uncompiled for micro-batches of 2 x 8"
    )
    later = {**event, "gave_up": False, "times": 5}
    assert last_recompilation([event, later], 1) is event


def test_a_run_that_does_not_compile_has_no_such_callback():
    session = SimpleNamespace(plan=tiny_plan(tiny_config(steps=1), 1), process=Ranks())
    assert recompilations_of(session, StepState(0), Journal()) is None
    session.plan.config.kernels.compile = CompileKind.blocks
    assert isinstance(recompilations_of(session, StepState(0), Journal()), Recompilations)


@pytest.mark.slow
def test_a_run_tells_of_a_batch_with_another_length(tmp_path):
    """The rules refuse these stages (TC349); here they pass without the compiler."""
    config = tiny_config(steps=6, evaluate_every_steps=2, gradient_accumulation_steps=1)
    config.training.micro_batch_size, config.training.global_batch_size = None, 4
    config.data.stages = [StageConfig(until_step=4, sequence_length=64), StageConfig()]
    plan = tiny_plan(config, 2)
    kernels = replace(plan.config.kernels, compile=CompileKind.blocks)
    run = RunPaths(tmp_path)
    train_cases(2, [Case(replace(plan, config=replace(plan.config, kernels=kernels)), run)])
    (event,) = read_events(run.events, "recompilation")
    assert (event["step"], event["part"], event["ranks"]) == (5, "step", [0, 1])
    assert (event["shape"], event["shape_before"]) == ([2, 128], [4, 64])
    assert event["reason"]  # torch tells how the call differs from the last one compiled
