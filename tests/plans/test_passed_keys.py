"""Every key of DeepSpeed's schema has one place in the tables of what may be passed through."""

from __future__ import annotations

import pytest
from plan_cases import config_with, gpus

from trainctl.config.derived import DerivedValue
from trainctl.plans.deepspeed import nest_settings
from trainctl.plans.deepspeed_table import CONDITIONS
from trainctl.rules.deepspeed_schema import load, versions
from trainctl.rules.passed_keys import (
    CONFIG_OWNED_KEYS,
    PASS_THROUGH_KEYS,
    TABLES,
    TRAINER_OWNED_KEYS,
    UNREAD_KEYS,
    entry_of,
)
from trainctl.rules.resolve import resolve


@pytest.mark.parametrize("version", versions())
def test_every_key_of_the_schema_is_in_the_tables(version):
    """Refused sections are listed as a whole, passed-through keys one by one."""
    schema = load(version)
    leaves = [key for key in schema.keys.values() if not key.is_section or key.unknown == "free"]
    assert [key.name for key in leaves if not entry_of(key.name, schema)] == []


def test_the_tables_name_keys_of_the_schema_and_each_once():
    names = [name for table in TABLES for name in table]
    assert [name for name in names if names.count(name) > 1] == []
    assert [name for name in names if name not in load().keys] == []
    assert [name for name in PASS_THROUGH_KEYS if load().keys[name].is_section] == []
    assert all(need in CONDITIONS for need in PASS_THROUGH_KEYS.values() if need)


def findings_of(key, value, **changes):
    section = nest_settings([DerivedValue(key=key, value=value, reason="")])
    resolution = resolve(config_with(deepspeed=section, **changes), gpus(8))
    return [(each.rule, each.key) for each in resolution.findings if each.is_error]


REFUSED = {
    "gradient_allreduce_op": "sum",
    "tensor_parallel.autotp_size": 2,
    "hybrid_engine.enabled": True,
    "managed_gradient_accumulation": False,
    "sequence_parallel_size": 2,
    "checkpoint.load_universal": True,
    "datastates_ckpt.host_cache_size": 16,
    "zero_optimization.offload_param.device": "cpu",
    "zero_optimization.max_live_parameters": 7,
    "zero_optimization.stage3_module_granularity_threshold": 100,
    "zero_optimization.cpu_offload": True,
    "zero_optimization.round_robin_gradients": True,
    "bfloat16.enabled": False,
    "wandb.enabled": True,
    "zero_allow_untested_optimizer": True,
    "fp16.auto_cast": True,
    "bf16.immediate_grad_update": True,
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_the_trainer_relies_on_is_refused(key):
    (found,) = findings_of(key, REFUSED[key], zero_stage__stage=3)
    entry = entry_of(key)
    assert entry in CONFIG_OWNED_KEYS or entry in TRAINER_OWNED_KEYS
    assert found[0] == "TC092" and found[1] in (f"deepspeed.{key}", f"deepspeed.{entry}")


IDLE_KEYS = {
    "weight_quantization.post_init_quant": {},
    "dataloader_drop_last": True,
    "zero_optimization.elastic_checkpoint": True,
    "zero_optimization.enable_sanity_checks": True,  # at another stage
    "aio.queue_depth": 32,  # without NVMe
}


@pytest.mark.parametrize("key", IDLE_KEYS)
def test_what_nothing_reads_is_an_error(key):
    found = findings_of(key, IDLE_KEYS[key], zero_stage__stage=2)
    assert found == [("TC430", f"deepspeed.{key}")]
    assert entry_of(key) in UNREAD_KEYS or entry_of(key) in PASS_THROUGH_KEYS


def test_a_program_of_the_users_may_set_all_but_what_config_keys_say():
    for key, value in REFUSED.items():
        found = findings_of(key, value, zero_stage__stage=2, script="train.py")
        refused = [rule for rule, name in found if rule in ("TC092", "TC430")]
        assert bool(refused) is (entry_of(key) in CONFIG_OWNED_KEYS), (key, found)


def test_what_is_tuned_for_nvme_takes_the_place_of_the_default():
    changes = {"zero_stage__stage": 3, "offload__optimizer": "nvme", "offload__nvme_path": "/n"}
    config = config_with(deepspeed={"aio": {"queue_depth": 32}}, **changes)
    plan = resolve(config, gpus(8)).plan
    assert plan is not None
    aio = plan.deepspeed["aio"]
    assert (aio["queue_depth"], aio["block_size"]) == (32, 1_048_576)
