"""The expert axis: its time in the step-time model, and its place in the search."""

from __future__ import annotations

from math import log, sqrt
from pathlib import Path
from typing import Any

import pytest
from made_runs import append, new_run, step
from throughput_rows import config_of, hardware_of, plan_of, published_model

from trainctl import api
from trainctl.launchers.plan_search import compose_search, measured_load
from trainctl.tuning.rates import (
    BALANCED_BY_BIAS,
    BALANCED_BY_LOSS,
    COLLECTIVE_LATENCY,
    GIGA,
    GROUPED_SHARE,
    LINK_SHARE,
    NETWORK_SHARE,
    device_rates,
    expert_time,
    rank_load,
)
from trainctl.tuning.space import Space
from trainctl.tuning.speed import StepTime, step_time

PUBLISHED = Path(__file__).parents[1] / "memory" / "published"
QWEN = published_model("qwen3-30b-a3b") | {
    "training.sequence_length": 4096,
    "training.micro_batch_size": 1,
    "training.gradient_accumulation_steps": 1,
    "zero_stage.stage": 1,
}


def time_of(nodes: int = 1, **changes: Any) -> StepTime:
    """Return the time of a step of Qwen3-30B-A3B on H100s; `zero_stage__stage=3` changes a key."""
    values = QWEN | {key.replace("__", "."): value for key, value in changes.items()}
    return step_time(plan_of(hardware_of("h100-80g", nodes, 8), values))


def test_the_busiest_rank_is_less_busy_than_the_busiest_expert() -> None:
    loads = {
        expert: rank_load(config_of(QWEN | {"experts.expected_load": 2.0}), expert)
        for expert in (1, 2, 8, 128)
    }
    assert loads[1] == 1.0
    assert loads[128] == pytest.approx(2.0)
    assert loads[8] == pytest.approx(1 + sqrt(log(8) / log(128) * 8 / 128))
    assert 1 < loads[2] < loads[8]
    assert rank_load(config_of(QWEN), 128) == pytest.approx(BALANCED_BY_LOSS)
    moved = config_of(QWEN | {"experts.bias_update_rate": 0.001})
    assert rank_load(moved, 128) == pytest.approx(BALANCED_BY_BIAS)
    assert rank_load(config_of({}), 1) == 1.0


def test_tokens_travel_over_the_slower_of_links_and_network() -> None:
    rows = 4096 * 8 * 2048 * 2  # each token to 8 experts, width 2048, two bytes
    even = {"experts__expected_load": 1.0, "parallelism__expert": 16}
    near = time_of(parallelism__expert=8, experts__expected_load=1.0)
    # Dispatch and return in either pass, in each of 48 blocks.
    once = 7 / 8 * rows / (450 * LINK_SHARE * GIGA) + 3 * COLLECTIVE_LATENCY
    assert near.experts == pytest.approx(4 * 48 * once)
    once = 8 / 16 * rows / (50 * NETWORK_SHARE * GIGA) + 4 * COLLECTIVE_LATENCY
    assert time_of(nodes=2, **even).experts == pytest.approx(4 * 48 * once)
    again = time_of(nodes=2, activation_checkpointing__mode="full", **even)
    assert again.experts == pytest.approx(6 * 48 * once)
    kept = time_of(nodes=2, activation_checkpointing__mode="selective", **even)
    assert kept.experts == pytest.approx(4 * 48 * once)
    assert "experts" not in time_of().parts
    assert time_of(parallelism__expert=8, experts__expected_load=2.0).experts > near.experts


def test_tensor_ranks_send_each_token_once() -> None:
    even = {"experts__expected_load": 1.0}
    apart = time_of(**even, parallelism__expert=8)
    both = time_of(**even, parallelism__expert=4, parallelism__tensor=2)
    rows = 4096 / 2 * 8 * 2048 * 2
    once = 7 / 8 * rows / (450 * LINK_SHARE * GIGA) + 3 * COLLECTIVE_LATENCY
    assert both.experts == pytest.approx(4 * 48 * once)
    assert both.experts < 0.6 * apart.experts
    # Two all-reduces in each pass, or one and an all-gather of what the experts return.
    alone = time_of(**even, parallelism__tensor=2)
    assert both.tensor == pytest.approx(alone.tensor * 3 / 4)
    # Eight ranks deviate from the mean, whichever axis they are on.
    config = config_of(QWEN | {"experts.expected_load": 2.0})
    rates = device_rates(hardware_of("h100-80g", 1, 8), config.precision)
    (_, whole), (_, half) = (expert_time(config, rates, 4096, size, 8 // size) for size in (1, 2))
    assert half == pytest.approx(whole / 2)


def test_a_load_slows_products_of_experts_alone() -> None:
    even, uneven = (
        time_of(parallelism__expert=8, experts__expected_load=load).compute for load in (1.0, 4.0)
    )
    assert 1.2 * even < uneven < 2 * even


def test_few_rows_of_an_expert_are_padded_to_tiles() -> None:
    config = config_of(QWEN | {"experts.expected_load": 1.0})
    rates = device_rates(hardware_of("h100-80g", 1, 8), config.precision)
    # 256 tokens are 16 rows of each of 128 experts; from eight ranks 128 rows of 16.
    few, _ = expert_time(config, rates, 256, 1, 1)
    many, _ = expert_time(config, rates, 256, 1, 8)
    whole, _ = expert_time(config, rates, 2**20, 1, 1)
    flops = 2 * 256 * 8 * 3 * 2048 * 768
    padding = flops * (5 - 1.5) / (rates.products * GROUPED_SHARE)
    weights = 2 * 128 * 3 * 2048 * 768 * 7 / 8 / rates.memory
    assert few - many == pytest.approx(padding + weights)
    assert many / 256 > whole / 2**20


def test_experts_are_gathered_and_reduced_over_their_replicas() -> None:
    alone, shared = (time_of(zero_stage__stage=3, parallelism__expert=expert) for expert in (1, 8))
    # All but 1.5 of 30.5 billion parameters are experts', and a rank has an eighth of them alone.
    assert shared.gather + shared.reduce < 0.1 * (alone.gather + alone.reduce)
    # Across machines the rings of eight ranks share the cards that one ring had alone.
    far = time_of(nodes=2, parallelism__expert=8)
    assert far.reduce == pytest.approx(time_of(nodes=2).reduce * (1 / 2) / (15 / 16), rel=0.1)
    assert far.optimizer == pytest.approx(time_of(nodes=2).optimizer)


def directory(folder: Path, name: str) -> str:
    (folder / "config.json").write_text((PUBLISHED / f"{name}.json").read_text())
    return f"model.path={folder}"


def test_the_search_shares_experts_out_and_says_why_not_faster(tmp_path: Path) -> None:
    arguments = (
        "model=hf",
        directory(tmp_path, "qwen3-30b-a3b"),
        "model.weights=random",
        "hardware=8xh200-141g",
        "parallelism.pipeline=1",
        "parallelism.tensor=1",
        "parallelism.sequence=1",
        "training.sequence_length=4096",
        "training.global_batch_size=64",
        "experts.bias_update_rate=0",
    )
    found = api.search(*arguments, "experts.expected_load=1.1").to_dict()["plans"]
    shared = [plan for plan in found if plan["mesh"]["expert"] > 1]
    assert shared
    for plan in shared:
        size = plan["mesh"]["expert"]
        assert f"parallelism.expert={size}" in plan["overrides"]
        assert plan["seconds_by_part"]["experts"] > 0
        assert 8 % size == plan["mesh"]["data"] % size == 0
    assert any("GiB" in (plan["next_faster"] or {"reason": ""})["reason"] for plan in shared)
    # The busier one expert is, the less it is worth to share experts out.
    fixed = ("zero_stage=3", f"parallelism.expert={shared[0]['mesh']['expert']}", "offload=none")
    times = [
        api.search(*arguments, *fixed, f"experts.expected_load={load}", top=1)
        .details.found[0]
        .time.seconds
        for load in (1.1, 4)
    ]
    assert times[1] > 1.2 * times[0]


def test_a_run_brings_the_load_of_its_experts(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    assert measured_load(run.root) is None
    assert measured_load(tmp_path) is None
    loads = [[9.0, 9.0], *([[1.5, 2.5]] * 30), *([[1.1, 1.3]] * 31)]
    append(run, (step(n, experts={"load_by_layer": each}) for n, each in enumerate(loads, 1)))
    assert measured_load(run.root) == pytest.approx(1.2)
    for more, expected in (((), 1.2), (("experts.expected_load=3",), 3.0)):
        found = compose_search(str(run.root), more, None)[0].config.experts
        assert found.expected_load == expected


def test_a_dense_model_has_no_expert_axis_to_search() -> None:
    values = {"training.global_batch_size": 8, "training.steps": 1, "model.num_layers": 2}
    space = Space(config_of(values), hardware_of("h100-80g", 1, 8), frozenset())
    sizes = {each.layout.mesh.expert for each in space.candidates(space.offloads[0])}
    assert sizes == {1}
