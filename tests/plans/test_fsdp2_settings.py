"""Tests of the plan's settings for torch's `fully_shard`, and of the empty DeepSpeed ones."""

from __future__ import annotations

import pytest
from plan_cases import config_with, cpus, gpus

from trainctl.engines.patch_checks import TABLES
from trainctl.engines.patches import ProcessKind
from trainctl.hardware.builds import needed_operators
from trainctl.rules.resolve import resolve

SHARDED = {"engine__kind": "fsdp2", "zero_stage__stage": 3}


def settings_of(hardware=None, **changes):
    plan = resolve(config_with(**{**SHARDED, **changes}), hardware or cpus()).plan
    assert plan is not None and plan.deepspeed == {}
    return plan.settings["fsdp2"]


def test_stages_are_whether_weights_are_gathered_again():
    assert settings_of()["reshard_after_forward"] is True
    assert settings_of(zero_stage__stage=2)["reshard_after_forward"] is False


def test_formats_and_the_optimizer_are_torchs():
    told = settings_of(gpus(), precision__compute="bf16", optimizer__kind="sgd")
    assert (told["param_dtype"], told["reduce_dtype"]) == ("bf16", "fp32")
    assert told["optimizer"]["type"] == "SGD" and told["optimizer"]["params"]["fused"]
    assert "optimizer" not in settings_of(gpus(), optimizer__kind="lion")  # trainctl's, not fused


@pytest.mark.parametrize("name", ["reduce_bucket_size", "sub_group_size"])
def test_sizes_of_deepspeeds_buffers_have_no_effect(name):
    config = config_with(**SHARDED, **{f"zero_stage__{name}": 1000})
    found = {each.key: each for each in resolve(config, cpus()).findings}
    assert found[f"zero_stage.{name}"].rule == "TC099"
    assert "it needs engine=deepspeed" in found[f"zero_stage.{name}"].message


def test_nothing_of_deepspeeds_is_compiled_or_relied_on():
    config = config_with(**SHARDED, offload__optimizer="cpu", offload__parameters="cpu")
    assert needed_operators(config, cpus()) == {}
    used = {table.package: table.needed(config, frozenset(ProcessKind)) for table in TABLES}
    assert not used["deepspeed"]
    assert any("FSDPModule" in use.target for use in used["torch"])
