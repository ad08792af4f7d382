"""Passes over the gradients, reads of the device, and pauses, of a step around the model's own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from passes_probe import READ, REDUCTION
from rank_processes import Case, tiny_config, tiny_plan, train_cases

from trainctl.config.schema import DataType, ModelConfig, RunConfig
from trainctl.runs.layout import RunPaths

LAYERS = 4
TENSORS = 11 * LAYERS + 2
"""Trained tensors of Qwen3 with tied embeddings."""
ACCUMULATED = 2
COPIES = {
    # Copies of each gradient that a layout itself makes on one rank, in a step.
    "ZeRO 0": 1,  # out of the flat buffer that is reduced
    "ZeRO 1": 2,  # into the bucket, and into the partition
    "ZeRO 2": 2 * ACCUMULATED,  # the same in each micro-batch
    "ZeRO 3": 2 * ACCUMULATED,
    "fsdp2": 4 * ACCUMULATED,  # and casts of shards and gradients
}
MOST_READS, MOST_REDUCTIONS = 4, 2


def config_of(layout: str, **changes: object) -> RunConfig:
    """Return the small Qwen3 in bf16, with the fused optimizer that a GPU has."""
    engine, stage = ("fsdp2", 3) if layout == "fsdp2" else ("deepspeed", int(layout[-1]))
    values = {
        "steps": 6,
        "sequence_length": 16,
        "global_batch_size": ACCUMULATED,
        "gradient_accumulation_steps": ACCUMULATED,
        "evaluation_samples": 2,
        "zero_stage__stage": stage,
        "precision__compute": DataType.bf16,
        "optimizer__fused": True,
        "engine__kind": engine,
    }
    config = tiny_config(**{**values, **changes})
    config.model = ModelConfig(
        family="qwen3",
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_layers=LAYERS,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return config


def case_of(config: RunConfig, folder: Path, ranks: int = 1) -> Case:
    return Case(tiny_plan(config, ranks), RunPaths(folder))


def kernels(counts: Counter[str]) -> int:
    return counts.total() - counts[READ] - counts[REDUCTION]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Return the kernels of a step of torch alone."""
    case = case_of(config_of("ZeRO 0"), tmp_path_factory.mktemp("bare"))
    [[counts]] = train_cases(1, [case], probe="passes_probe:bare")
    return kernels(counts)


def test_a_step_has_the_passes_of_torch_alone_and_those_of_its_layout(
    tmp_path: Path, bare: int
) -> None:
    cases = [case_of(config_of(layout), tmp_path / layout) for layout in COPIES]
    [found] = train_cases(1, cases, probe="passes_probe:trained")
    for (layout, copies), (_, *steps) in zip(COPIES.items(), found, strict=True):
        assert len(steps) > 2
        for counts in steps:  # the first one allocates the optimizer's states
            most = 1.05 * bare + (0 if layout == "ZeRO 0" else copies * TENSORS)
            assert kernels(counts) <= most, (layout, kernels(counts), most)
            assert counts[READ] <= MOST_READS, (layout, counts[READ])
            assert counts[REDUCTION] <= MOST_REDUCTIONS, (layout, counts[REDUCTION])


def test_callbacks_add_nothing_between_their_steps(tmp_path: Path) -> None:
    every = 4
    plain, watched = config_of("ZeRO 1"), config_of("ZeRO 1")
    names = ("gradient_noise_scale", "layer_statistics")
    watched.callbacks = {name: {"every_steps": every} for name in names}
    cases = [case_of(plain, tmp_path / "plain"), case_of(watched, tmp_path / "watched")]
    [[without, with_them]] = train_cases(1, cases, probe="passes_probe:trained")
    added = [more - less for less, more in zip(without, with_them, strict=True)]
    # All ranks agree behind each step whether to save before hooks that may take long.
    agreement = Counter({REDUCTION: 1, "c10d.allreduce_.default": 1})
    assert added[every - 1] > agreement
    assert all(each == agreement for step, each in enumerate(added, 1) if step != every)


def test_all_ranks_make_their_full_collections_behind_the_same_steps(
    tmp_path: Path,
) -> None:
    case = case_of(config_of("ZeRO 1", global_batch_size=4), tmp_path / "run", 2)
    first, second = train_cases(2, [case], probe="passes_probe:collected")
    assert first == second == [([0, 1], True)]
