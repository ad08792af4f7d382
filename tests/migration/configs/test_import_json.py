"""A DeepSpeed JSON turned into overrides renders back to one that DeepSpeed reads the same."""

from __future__ import annotations

import random

import pytest
from sampler import legal

from trainctl.config.compose import compose
from trainctl.hardware import resolve_hardware
from trainctl.migration.configs.import_json import BATCH, TRAINCTL_KEYS, differences, import_json
from trainctl.migration.configs.import_values import LEFT_OPEN
from trainctl.rules.deepspeed.case import JsonContext
from trainctl.rules.resolve import check_json, resolve

RANKS = 2
BASE = {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": True}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1, "betas": [0.9, 0.95]}}


def rendered(imported, hardware=f"{RANKS}xcpu"):
    steps = [] if "training.steps" in imported.settings else ["training.steps=100"]
    config = compose([f"hardware={hardware}", *imported.overrides, *steps]).config
    resolution = resolve(config, resolve_hardware(config.hardware))
    assert resolution.plan is not None, resolution.findings
    return resolution.plan.deepspeed


def assert_equivalent(config):
    imported = import_json(config, world_size=RANKS)
    left = {each.key for each in imported.left_out}
    different = set(differences(config, rendered(imported), world_size=RANKS))
    assert different <= left, (config, imported.overrides)
    return imported


@pytest.mark.parametrize("seed", range(40))
def test_the_round_trip_of_a_legal_json(seed):
    config = legal(random.Random(1000 + seed))
    surroundings = JsonContext(world_size=RANKS)
    assert not [each for each in check_json(config, surroundings) if each.is_error]
    assert_equivalent(config)


def test_a_wrong_import_would_be_seen():
    imported = import_json({**BASE, "zero_optimization": {"stage": 2}}, world_size=RANKS)
    for changes in (
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5}},
        {"zero_optimization": {"stage": 1}},
        {"train_batch_size": 16},
        {"gradient_clipping": 0.5},
        {"bf16": {"enabled": False}},
        {"prescale_gradients": True},
    ):
        other = {**BASE, "zero_optimization": {"stage": 2}, **changes}
        assert differences(other, rendered(imported), world_size=RANKS), changes


def test_choices_settings_and_what_is_passed_through():
    config = {
        **BASE,
        "optimizer": ADAMW,
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 500, "warmup_num_steps": 20, "warmup_type": "linear"},
        },
        "zero_optimization": {"stage": 3, "round_robin_gradients": False, "sub_group_size": 1000},
        "dataloader_drop_last": True,
        "dump_state": True,
        "steps_per_print": 10,
    }
    imported = assert_equivalent(config)
    assert imported.choices == {
        "optimizer": "adamw",
        "schedule": "cosine",
        "zero_stage": "3",
        "offload": "none",
        "precision": "bf16",
    }
    assert imported.settings["optimizer.lr"] == 1e-4
    assert imported.settings["schedule.warmup_steps"] == 20
    assert imported.settings["training.steps"] == 500
    assert imported.settings["zero_stage.sub_group_size"] == 1000
    assert imported.passed == {"dump_state": True}
    assert [each.key for each in imported.left_out] == ["dataloader_drop_last", "steps_per_print"]


def test_what_a_torch_name_means():
    imported = assert_equivalent({**BASE, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}})
    assert imported.choices["optimizer"] == "adamw"  # as DeepSpeed takes it
    params = {"lr": 1e-3, "adam_w_mode": False}
    imported = assert_equivalent({**BASE, "optimizer": {"type": "Adam", "params": params}})
    assert imported.choices["optimizer"] == "adam"


def test_what_cannot_be_expressed_is_reported():
    config = {
        **BASE,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "amsgrad": True}},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}},
    }
    left = {each.key for each in import_json(config, world_size=RANKS).left_out}
    assert left == {"optimizer.params.amsgrad", "scheduler.type"}
    config = {**BASE, "optimizer": {"type": "Adagrad"}}
    assert [each.key for each in import_json(config, world_size=RANKS).left_out] == [
        "optimizer.type"
    ]


def test_sizes_that_deepspeed_takes_for_one():
    """axolotl publishes `sub_group_size: 0`."""
    zero = {"stage": 3, "sub_group_size": 0, "zero_hpz_partition_size": 0}
    imported = assert_equivalent({**BASE, "zero_optimization": zero})
    assert imported.settings["zero_stage.sub_group_size"] == 1
    assert imported.left_out == ()


@pytest.mark.parametrize("is_offloaded", [True, False])
def test_another_kernel_than_the_one_requested_is_reported(is_offloaded):
    device = {"offload_optimizer": {"device": "cpu"}} if is_offloaded else {}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": is_offloaded}}
    config = {**BASE, "optimizer": optimizer, "zero_optimization": {"stage": 2, **device}}
    assert [(each.key, each.value) for each in assert_equivalent(config).left_out] == [
        ("optimizer.params.torch_adam", is_offloaded)
    ]
    optimizer["params"]["torch_adam"] = not is_offloaded
    assert assert_equivalent(config).left_out == ()


def test_a_loss_scale_beside_bf16_is_left_out():
    config = {**BASE, "fp16": {"enabled": False, "initial_scale_power": 20}}
    imported = assert_equivalent(config)
    assert imported.passed == {}
    assert [each.key for each in imported.left_out] == ["fp16.initial_scale_power"]


def test_what_the_trainer_does_otherwise_is_left_out_and_not_passed_through():
    zero = {"stage": 2, "round_robin_gradients": True, "elastic_checkpoint": True}
    config = {**BASE, "zero_optimization": zero, "tensorboard": {"enabled": True}}
    imported = assert_equivalent(config)
    assert imported.passed == {}
    assert {each.key.rpartition(".")[2] for each in imported.left_out} == {
        "round_robin_gradients",
        "elastic_checkpoint",
        "enabled",
    }


def test_deprecated_keys_are_taken_over_or_named():
    zero = {"stage": 3, "cpu_offload": True, "stage3_gather_fp16_weights_on_model_save": True}
    imported = import_json({**BASE, "zero_optimization": zero}, world_size=RANKS)
    assert imported.choices["offload"] == "cpu"
    assert [each.key.rpartition(".")[2] for each in imported.left_out] == [
        "stage3_gather_fp16_weights_on_model_save"
    ]


def test_the_batch_of_a_tensor_parallel_json_is_the_true_one():
    config = {
        **BASE,
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": 2},
        "gradient_accumulation_steps": 1,
    }
    imported = import_json(config, world_size=4)
    assert imported.settings["parallelism.tensor"] == 2
    assert imported.settings["training.global_batch_size"] == 4
    assert rendered(imported, "4xh100-80g")["train_batch_size"] == 4


def test_values_that_others_fill_in_are_left_to_trainctl():
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }
    imported = import_json(config, world_size=RANKS)
    assert not [key for key in imported.settings if key.startswith("training.")]
    assert "optimizer.gradient_clipping" not in imported.settings
    assert "precision" not in imported.choices
    assert imported.passed == {}


def test_what_is_auto_was_set_by_nobody_and_is_named():
    """DeepSpeed's own defaults are not imported either, because nobody chose them."""
    config = {
        **dict.fromkeys(BATCH, "auto"),
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(["lr", "betas", "eps"], "auto")},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
                "warmup_type": "linear",
            },
        },
        "zero_optimization": {
            "stage": "auto",
            "reduce_bucket_size": "auto",
            "offload_optimizer": {"device": "auto", "nvme_path": "auto"},
        },
    }
    imported = import_json(config, world_size=RANKS)
    # The weight decay is not "auto" but left out, so that of DeepSpeed's class is meant.
    assert imported.settings == {"optimizer.weight_decay": 0.0}
    assert set(imported.choices) == {"optimizer", "schedule"}
    named = {each.key: each for each in imported.left_out}
    assert {*BATCH, "optimizer.params.lr", "scheduler.params.warmup_num_steps"} <= named.keys()
    assert {"zero_optimization.stage", "zero_optimization.offload_optimizer.device"} <= named.keys()
    assert len(named) == 15 and {each.value for each in named.values()} == {"auto"}
    assert named["optimizer.params.lr"].reason == "nobody set it; optimizer.lr says it here"


def test_every_name_for_what_is_auto_exists():
    from trainctl.config.schema import RunConfig, walk_leaves
    from trainctl.rules.deepspeed.case import HF_AUTO_KEYS

    keys = {key for key, _, _ in walk_leaves(RunConfig())}
    assert LEFT_OPEN.keys() <= HF_AUTO_KEYS
    named = {name for text in LEFT_OPEN.values() for name in text.split(" and ")}
    assert {name for name in named if not name.startswith("the group ")} <= keys


PUBLISHED = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 500,
        "hysteresis": 3,
        "min_loss_scale": 4,
    },
    "bf16": {"enabled": False},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        "reduce_bucket_size": "auto",
    },
    "activation_checkpointing": {
        "partition_activations": True,
        "cpu_checkpointing": True,
        "contiguous_memory_optimization": True,
        "number_checkpoints": None,
        "profile": False,
    },
    "optimizer": ADAMW,
}
"""The kind of JSON that guides print: with a section that only a model of the script's reads."""


def test_the_json_of_a_guide_is_accepted_and_its_run_recomputes():
    around = JsonContext(world_size=RANKS, fills_auto=True)
    found = check_json(PUBLISHED, around)
    assert not [each for each in found if each.is_error]
    assert {"TC295", "TC296"} <= {each.rule for each in found}  # said all the same
    imported = import_json(PUBLISHED, world_size=RANKS)
    assert imported.choices["activation_checkpointing"] == "offloaded"
    assert not [key for key in imported.passed if key.startswith("activation_checkpointing")]
    left = {each.key.rpartition(".")[2] for each in imported.left_out}
    assert left == {
        "partition_activations",
        "contiguous_memory_optimization",
        "reduce_bucket_size",
    }
    config = compose(["hardware=2xh100-80g", *imported.overrides, "training.steps=9"]).config
    assert config.activation_checkpointing.mode == "full"
    scale = rendered(imported, "2xh100-80g")["fp16"]
    assert {name: scale[name] for name in PUBLISHED["fp16"]} == PUBLISHED["fp16"]


def test_recomputation_on_the_device_and_over_tensor_ranks():
    config = {
        **BASE,
        "tensor_parallel": {"autotp_size": 2},
        "activation_checkpointing": {"partition_activations": True},
    }
    imported = import_json(config, world_size=RANKS)
    assert imported.choices["activation_checkpointing"] == "full"
    key = "activation_checkpointing.partition_across_tensor_ranks"
    assert imported.settings[key] is True and not imported.left_out
    nothing = import_json({**BASE, "activation_checkpointing": {}}, world_size=RANKS)
    assert "activation_checkpointing" not in nothing.choices


def test_the_keys_that_trainctl_sets_itself_exist():
    from trainctl.rules.deepspeed_schema import load

    assert all(key in load().keys or key.startswith("optimizer.params.") for key in TRAINCTL_KEYS)
