"""Tests that unsupported techniques are refused by messages that name the key."""

from __future__ import annotations

import pytest
from plan_cases import config_with, gpus, keys

from trainctl.config.registry import list_kinds
from trainctl.config.schema import RunConfig
from trainctl.rules.resolve import not_yet, resolve


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__family": "gpt2"},
        {"schedule__kind": "linear"},
        {"zero_stage__stage": 3, "activation_checkpointing__mode": "full"},
        {"activation_checkpointing__mode": "selective"},
        {
            "activation_checkpointing__mode": "full",
            "activation_checkpointing__offload_to_cpu": True,
            "activation_checkpointing__partition_across_tensor_ranks": True,
        },
        {"kernels__liger": True, "kernels__cross_entropy": "liger_fused"},
        {"kernels__compile": "deepcompile"},
        {"precision__compute": "fp32"},
        {"precision__compute": "fp16"},
        {"precision__compute": "fp8"},
        {"precision__autocast": True},
        {"precision__master_weights": "bf16", "precision__optimizer_states": "bf16"},
        {"precision__gradient_accumulation": "fp32", "precision__communication": "fp32"},
        {"zero_stage__hpz_partition_size": 8},
        {"zero_stage__quantized_weights": True, "zero_stage__quantized_gradients": True},
        {"offload__optimizer": "cpu", "offload__ratio": 0.5},
        {"offload__super_offload": True},
        {"offload__optimizer": "cpu", "offload__zenflow": True},
        {"checkpoint__best_of": "loss", "checkpoint__asynchronous": True},
        {"logging__profile_steps": [2, 3]},
        *({"schedule__kind": kind} for kind in list_kinds("schedule")),
        {"stability__on_bad_loss": "rewind", "stability__spike_factor": 2.0},
        {"stability__z_loss": 1e-4, "gradients__noise": 0.01, "gradients__centralize": True},
        {"model__mup": True, "model__mup_base_width": 64},
        {"offload__optimizer": "cpu"},
        {
            "zero_stage__stage": 3,
            "offload__optimizer": "nvme",
            "offload__parameters": "nvme",
            "offload__nvme_path": "/n",
        },
    ],
)
def test_what_can_be_trained_today_is_not_refused(changes):
    assert not_yet(config_with(**changes)) == ()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model__trust_remote_code": True}, "model.trust_remote_code=true"),
    ],
)
def test_each_technique_to_come_is_named_with_its_key(changes, key):
    (sentence,) = not_yet(config_with(**changes))
    assert key in sentence
    assert sentence.split("=")[0] in keys(RunConfig())
    assert sentence.endswith("is not there yet")


def test_an_untrainable_plan_is_still_a_plan():
    plan = resolve(config_with(model__trust_remote_code=True), gpus()).plan
    assert plan is not None
    (sentence,) = plan.not_yet
    assert sentence.startswith("model.trust_remote_code=true: training with ")
