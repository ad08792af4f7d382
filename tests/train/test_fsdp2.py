"""torch's `fully_shard` as the engine: the same curve, the same checkpoints, without DeepSpeed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ports import reserved_port
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, with_stop

from trainctl.config.codec import to_plain
from trainctl.config.registry import new_section
from trainctl.data.prepare import prepare
from trainctl.plans.types import RunPlan
from trainctl.runs.files import write_json
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events

pytestmark = pytest.mark.slow

STEPS = 6
RANKS = 2
PROBE = "fsdp2_probe:train"

UNEVEN = {
    "model__vocab_size": 261,
    "model__hidden_size": 63,
    "model__num_attention_heads": 3,
    "model__num_key_value_heads": 3,
    "model__head_dim": 22,
    "model__intermediate_size": 175,
}
"""First dimensions that two ranks cannot halve."""

THE_REST = {
    **UNEVEN,
    "model__tie_word_embeddings": False,
    "activation_checkpointing__mode": "full",
    "kernels__cross_entropy": "chunked",
    "stability__z_loss": 1e-4,
    "gradients__clip_value": 1e-2,
    "training__ema_decay": 0.9,
}

SIXTEEN_BITS = {"precision__compute": "bf16", "sequence_length": 64, "global_batch_size": 4}
"""Settings of a bf16 run. It has few tokens because bf16 is slow on CPUs."""


def plan_of(stage: int = 3, engine: str = "fsdp2", world_size: int = RANKS, **changes) -> RunPlan:
    config = tiny_config(
        steps=STEPS,
        evaluate_every_steps=STEPS,
        sample_tokens=8,
        zero_stage__stage=stage,
        engine__kind=engine,
        **{
            "precision__compute": "fp32",
            "optimizer__gradient_clipping": 0.5,  # always active
            **changes,
        },
    )
    return tiny_plan(config, world_size)


def end_of(run: RunPaths) -> tuple[float, str]:
    """Held-out loss and the sampled text."""
    events = {event["event"]: event for event in read_events(run.events)}
    return events["evaluation"]["loss"], events["sample"]["text"]


def assert_alike(run: RunPaths, expected: RunPaths, *, loss: float = 1e-6, norm: float = 5e-6):
    for step, (its_loss, its_norm) in curve(expected).items():
        assert curve(run)[step][0] == pytest.approx(its_loss, rel=loss), step
        assert curve(run)[step][1] == pytest.approx(its_norm, rel=norm), step
    assert end_of(run)[0] == pytest.approx(end_of(expected)[0], rel=loss)


def test_the_curve_matches_zero_3_and_a_run_goes_on_under_either(tmp_path):
    """Tied embeddings, first dimensions that do not divide, recomputation, an average, and back."""
    run = {
        name: RunPaths(tmp_path / name)
        for name in ("zero", "zero-rest", "zero-16", "3", "2", "rest", "16", "there", "host")
    }
    zero, rest = plan_of(engine="deepspeed"), plan_of(engine="deepspeed", **THE_REST)
    half = plan_of(engine="deepspeed", **SIXTEEN_BITS)
    cases = {"zero": zero, "zero-rest": rest, "zero-16": half, "there": with_stop(zero, 2)}
    train_cases(RANKS, [Case(plan, run[name]) for name, plan in cases.items()], together=True)
    train_cases(
        RANKS,
        [
            Case(plan_of(), run["3"]),
            Case(plan_of(2, engine__reduce_every_micro_batch=False), run["2"]),
            Case(plan_of(**THE_REST), run["rest"]),
            Case(plan_of(**SIXTEEN_BITS), run["16"]),
            Case(with_stop(plan_of(2), 4), run["there"], 2),
            Case(plan_of(offload__optimizer="cpu", offload__parameters="cpu"), run["host"]),
        ],
        probe=PROBE,
    )
    train_cases(RANKS, [Case(zero, run["there"], 3)])
    for name in ("3", "2", "there", "host"):
        assert_alike(run[name], run["zero"])
    assert_alike(run["rest"], run["zero-rest"])
    assert end_of(run["there"])[1] == end_of(run["3"])[1] == end_of(run["zero"])[1]
    # DeepSpeed adds up and sends gradients of 16-bit weights in 16 bits, torch's in fp32.
    assert_alike(run["16"], run["zero-16"], loss=1e-3, norm=3e-2)


def test_an_optimizer_of_trainctls_own_updates_alike(tmp_path):
    optimizer = to_plain(new_section("optimizer", "lion", lr=1e-3, gradient_clipping=0.5))
    changes = {f"optimizer__{key}": value for key, value in optimizer.items()}
    run = {engine: RunPaths(tmp_path / engine) for engine in ("deepspeed", "fsdp2")}
    for engine, paths in run.items():
        train_cases(RANKS, [Case(plan_of(engine=engine, **changes), paths)])
    assert_alike(run["fsdp2"], run["deepspeed"])


WITHOUT_DEEPSPEED = """
import sys
sys.modules["deepspeed"] = None  # as if it were not installed
from trainctl.train.__main__ import main
sys.exit(main())
"""


def test_a_rank_trains_where_deepspeed_cannot_be_imported(tmp_path):
    plan, run = plan_of(world_size=1), RunPaths(tmp_path)
    attempt = run.attempt(1)
    attempt.logs.mkdir(parents=True)
    write_json(attempt.plan, to_plain(plan))
    prepare(plan, run)
    with reserved_port() as port:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        subprocess.run(
            [sys.executable, "-c", WITHOUT_DEEPSPEED, str(run.root), "--attempt", "1"],
            check=True,
            env={**os.environ, **alone, **meeting},
        )
    assert len(curve(run)) == STEPS
