"""The shipped recipes: what they declare, and that they multiply out."""

from __future__ import annotations

from itertools import product

import pytest
from whole_recipes import WHOLE

from trainctl.config.catalog import leading_comment, list_recipes
from trainctl.config.compose import compose
from trainctl.config.schema import Accelerator, DataType, OffloadDevice, RunConfig
from trainctl.config.yaml_files import read_document
from trainctl.hardware import resolve_hardware
from trainctl.tuning.assess import assess
from trainctl.tuning.search import FoundPlan, search
from trainctl.tuning.speed import step_time, with_values

RECIPES = {info.name: info for info in list_recipes()}
PROMISED = (
    "tiny 125m 1b-zero1 7b-zero2 7b-zero3 7b-zero3-offload 7b-zero3-nvme 13b-zero3 "
    "70b-zero3-nodes 70b-3d 8b-long-context 8b-fp8 "
    "sft-tiny sft-8b-lora-1x24g sft-8b-full-8x80g sft-70b-lora-8x80g sft-70b-qlora-1x80g "
    "multi-token-tiny process-reward-tiny "
    "reward-tiny reward-8b-8x80g classify-tiny classify-0.6b-1x24g "
    "contrastive-tiny contrastive-7b-lora-8x80g "
    "dpo-8b-lora kto-tiny masked-tiny distill-tiny distill-1b-8x80g grpo-tiny grpo-8b-8x80g"
)
DEVICES = {
    "tiny": 2,
    "125m": 1,
    "1b-zero1": 8,
    "7b-zero2": 8,
    "7b-zero3": 8,
    "7b-zero3-offload": 1,
    "7b-zero3-nvme": 1,
    "13b-zero3": 8,
    "70b-zero3-nodes": 64,
    "70b-3d": 64,
    "8b-long-context": 8,
    "8b-fp8": 8,
    "dpo-8b-lora": 1,
    "multi-token-tiny": 2,
    "process-reward-tiny": 2,
    "reward-tiny": 2,
    "reward-8b-8x80g": 8,
    "classify-tiny": 2,
    "classify-0.6b-1x24g": 1,
    "contrastive-tiny": 2,
    "contrastive-7b-lora-8x80g": 8,
    "distill-tiny": 2,
    "grpo-tiny": 2,
    "grpo-8b-8x80g": 8,
    "distill-1b-8x80g": 8,
    "sft-8b-lora-1x24g": 1,
    "sft-8b-full-8x80g": 8,
    "sft-70b-lora-8x80g": 8,
    "sft-70b-qlora-1x80g": 1,
}


def recipe_of(name: str, *overrides: str) -> RunConfig:
    return compose([f"recipe={name}", *overrides]).config


def data_parallel_size(config: RunConfig) -> int:
    assert config.hardware.devices_per_node is not None
    devices = config.hardware.nodes * config.hardware.devices_per_node
    sizes = config.parallelism
    others = sizes.tensor * sizes.pipeline * sizes.sequence
    assert devices % others == 0
    assert sizes.data in (None, devices // others)
    return devices // others


def test_the_promised_recipes_are_there() -> None:
    assert set(RECIPES) == set(PROMISED.split())


@pytest.mark.parametrize("name", WHOLE)
def test_a_recipe_composes_without_a_warning(name: str) -> None:
    composed = compose([f"recipe={name}"])
    assert composed.findings == ()
    assert composed.config.recipe == name


@pytest.mark.parametrize("name", RECIPES)
def test_the_first_comment_tells_hardware_and_sources(name: str) -> None:
    comment = leading_comment(RECIPES[name].path)
    assert comment[0].endswith(".")
    assert comment[1].startswith("Hardware: ")
    assert any(line.startswith("Hyperparameters: ") for line in comment)
    assert "arXiv:" in " ".join(comment)


@pytest.mark.parametrize("name", WHOLE)
def test_a_recipe_declares_its_hardware(name: str) -> None:
    hardware = recipe_of(name).hardware
    assert hardware.name != "auto"
    assert hardware.devices_per_node is not None
    assert hardware.nodes * hardware.devices_per_node == DEVICES[name]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(
    "overrides", [[], ["model=tiny-llama", "hardware=cpu", "parallelism=data"]]
)
def test_the_batch_multiplies_out(name: str, overrides: list[str]) -> None:
    config = recipe_of(name, *overrides)
    training = config.training
    assert training.global_batch_size and training.micro_batch_size
    assert (
        training.global_batch_size % (training.micro_batch_size * data_parallel_size(config)) == 0
    )
    fine_tunes = name.startswith(
        ("sft-", "dpo-", "contrastive-", "distill-1b", "reward-8b", "classify-0")
    )
    assert training.epochs if fine_tunes else (training.steps or training.tokens)
    assert sum(map(bool, (training.steps, training.tokens, training.epochs))) == 1


@pytest.mark.parametrize("name", WHOLE)
def test_sequences_fit_the_model_and_warmup_fits_the_run(name: str) -> None:
    config = recipe_of(name)
    training = config.training
    assert training.sequence_length <= config.model.max_position_embeddings
    assert training.global_batch_size is not None
    tokens_per_step = training.global_batch_size * training.sequence_length
    steps = training.steps or -(-(training.tokens or 0) // tokens_per_step)
    assert (config.schedule.warmup_steps or 0) < (steps or 1)  # of epochs a share


@pytest.mark.parametrize("name", WHOLE)
def test_a_recipe_sets_nothing_that_was_so_already(name: str) -> None:
    """Deltas only: no line of a recipe repeats what it starts from."""
    composed = compose([f"recipe={name}"])
    lines = {setting.key for setting in read_document(RECIPES[name].path, name).settings}
    for key in lines:
        values = [layer.value for layer in composed.layers[key]]
        assert len(values) == 1 or values[-1] != values[-2], key


@pytest.mark.parametrize("name", WHOLE)
def test_a_recipe_shrinks_to_a_laptop(name: str) -> None:
    config = recipe_of(
        name,
        "model=tiny-llama",
        "hardware=2xcpu",
        "parallelism=data",
        "offload=none",
        "precision=fp32",
        "training.sequence_length=64",
        "training.steps=3",
    )
    assert config.model.name == "tiny-llama"
    assert config.hardware.devices_per_node == 2
    assert data_parallel_size(config) == 2
    assert config.precision.compute == DataType.fp32


ZERO = frozenset(["zero_stage.stage"])
PROMISES = {
    "1b-zero1": ZERO,
    "7b-zero2": ZERO,
    "7b-zero3": ZERO,
    "13b-zero3": ZERO,
    "70b-zero3-nodes": ZERO,
    "7b-zero3-offload": ZERO | {"offload"},  # another stage keeps the weights on the device
    "7b-zero3-nvme": ZERO | {"offload"},  # host memory is faster, where there is enough
    "70b-3d": frozenset(["parallelism.tensor", "parallelism.pipeline"]),  # of any size
}
"""Keys of the layout that a recipe's name promises. The search chooses all others."""

ON_GPUS = [name for name in WHOLE if not name.endswith("tiny")]


def fastest(name: str) -> FoundPlan:
    """The fastest plan that keeps what the recipe's name promises."""
    config, kept = recipe_of(name), PROMISES.get(name, frozenset())
    hardware, variants = resolve_hardware(config.hardware), [config]
    if name == "70b-3d":
        sizes = product((2, 4, 8), repeat=2)
        variants = [
            with_values(config, dict(zip(sorted(kept), each, strict=True))) for each in sizes
        ]
    searches = [search(each, hardware, fixed=kept, top=1) for each in variants]
    plans = [plan for each in searches for plan in each.found]
    return max(plans, key=lambda plan: plan.tokens_per_second)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_GPUS)
def test_a_recipe_is_as_fast_as_its_name_allows(name: str) -> None:
    config = recipe_of(name)
    assert config.hardware.accelerator is not Accelerator.cpu
    own, best = assess(config, resolve_hardware(config.hardware)), fastest(name)
    assert own.plan is not None and own.fits
    speed = own.plan.batch.tokens_per_step / step_time(own.plan).seconds
    assert speed >= 0.97 * best.tokens_per_second, best.overrides


def test_every_promise_is_in_a_name() -> None:
    axes = recipe_of("70b-3d").parallelism
    assert min(axes.data or 0, axes.tensor, axes.pipeline) > 1
    for name, kept in PROMISES.items():
        config = recipe_of(name)
        if kept >= ZERO:
            assert f"zero{config.zero_stage.stage}" in name
        if "offload" in kept:
            assert config.offload.parameters is not OffloadDevice.none


def test_the_demo_is_what_the_readme_says() -> None:
    config = recipe_of("tiny")
    assert config.zero_stage.stage == 2
    assert config.training.sequence_length <= config.model.max_position_embeddings
    assert config.model.vocab_size >= 257
    assert config.training.sample_tokens > 0
