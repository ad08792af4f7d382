"""Tests of each rule's message, and that correct JSON gets none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from sampler import BREAKS, around, broken

from trainctl.config.schema import Accelerator, ModelConfig
from trainctl.errors import Severity
from trainctl.rules.deepspeed.case import Case, JsonContext
from trainctl.rules.deepspeed_schema import load, versions
from trainctl.rules.resolve import JSON_RULES, check_json

GOLDEN = Path(__file__).parent / "messages.txt"
CUDA = JsonContext(world_size=8, devices_per_node=8, accelerator=Accelerator.cuda)
GOOD = {
    "train_batch_size": 64,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 1000, "warmup_num_steps": 10},
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"},
        "offload_param": {"device": "cpu"},
    },
}


PLAIN = {
    "train_batch_size": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


def rules_of(config, surroundings=CUDA):
    return {finding.rule for finding in check_json(config, surroundings)}


def changed(**sections):
    config = json.loads(json.dumps(GOOD))
    for name, value in sections.items():
        if isinstance(value, dict) and isinstance(config.get(name), dict):
            config[name].update(value)
        else:
            config[name] = value
    return config


def test_a_good_json_has_no_findings():
    assert check_json(GOOD, CUDA) == ()


def test_every_break_of_every_rule_says_what_it_said():
    lines = []
    for rule, changes in BREAKS:
        case = broken(json.loads(json.dumps(PLAIN)), rule, changes)
        found = [each for each in check_json(case["json"], around(case)) if each.rule == rule]
        assert found, (rule, case)
        for each in found:
            lines += [f"{each.severity}[{each.rule}]: {each.key}: {each.message}"]
            lines += [f"  hint: {each.hint}"] if each.hint else []
    text = "\n".join(lines) + "\n"
    if os.environ.get("TRAINCTL_UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_identifiers_are_unique_and_every_rule_says_what_it_holds():
    identifiers = [rule.code for rule in JSON_RULES]
    assert len(set(identifiers)) == len(identifiers)
    assert all(rule.title and rule.fix and rule.file for rule in JSON_RULES)
    assert all(identifier.startswith(("TC2", "TC43")) for identifier in identifiers)


def test_errors_come_first():
    found = check_json({"gradient_cliping": 1, "optimizer": {"type": "Adam"}}, CUDA)
    severities = [finding.severity for finding in found]
    assert severities == sorted(severities, key=lambda each: each is Severity.warning)
    assert Severity.warning in severities


@pytest.mark.parametrize(
    ("rule", "config", "surroundings"),
    [
        ("TC209", changed(train_batch_size="auto"), JsonContext(fills_auto=True)),
        (
            "TC218",
            changed(tensor_parallel={"autotp_size": 3}),
            JsonContext(model=ModelConfig(num_attention_heads=4)),
        ),
        (
            "TC218",
            changed(sequence_parallel_size=8),
            JsonContext(model=ModelConfig(num_attention_heads=4)),
        ),
        (
            "TC289",
            changed(
                zero_optimization={
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/n", "buffer_count": 3}
                }
            ),
            CUDA,
        ),
        (
            "TC289",
            changed(
                zero_optimization={
                    "offload_param": {"device": "nvme", "nvme_path": "/n", "buffer_size": 10}
                }
            ),
            JsonContext(world_size=8, model=ModelConfig()),
        ),
        ("TC246", changed(checkpoint={"writer": {}}, zero_optimization={"stage": 1}), CUDA),
    ],
)
def test_what_the_tiny_model_on_two_processes_cannot_show(rule, config, surroundings):
    assert rule in rules_of(config, surroundings)


@pytest.mark.parametrize(
    ("scale", "stage", "is_wrong"),
    [(0, 0, True), (128, 0, True), (1, 0, False), (0, 1, False)],
)
def test_without_zero_only_a_loss_scale_of_1_trains_right_in_fp16(scale, stage, is_wrong):
    config = {**PLAIN, "fp16": {"enabled": True, "loss_scale": scale}}
    config |= {"zero_optimization": {"stage": stage}}
    assert rules_of(config, JsonContext()) == ({"TC432"} if is_wrong else set())


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("comment", "TC433"),
        ("_comment", "TC433"),
        ("comms_config", "TC433"),
        ("pipe-parallel-size", "TC433"),
        ("gradient_cliping", "TC204"),
        ("Zero_Optimisation", "TC204"),
        ("train_batch", "TC204"),
        ("stage", "TC204"),  # of a section
    ],
)
def test_a_key_at_the_top_is_a_mistake_only_where_it_is_near(key, rule):
    assert rules_of({**PLAIN, key: 1}, JsonContext()) == {rule}


def test_random_ltd_goes_without_the_batch_that_deepspeed_fills_in():
    needs = {"total_layer_num": 24, "random_ltd_layer_num": 22, "random_ltd_schedule": {}}
    routing = {"enabled": True, "random_ltd": {"enabled": True, **needs}}
    config = {**PLAIN, "data_efficiency": {"enabled": True, "data_routing": routing}}
    assert rules_of(config, JsonContext()) == set()
    del routing["random_ltd"]["random_ltd_schedule"]
    assert rules_of(config, JsonContext()) == {"TC298"}


def test_values_that_others_fill_in_are_not_judged():
    config = changed(
        train_batch_size="auto",
        train_micro_batch_size_per_gpu="auto",
        bf16={"enabled": "auto"},
        gradient_clipping="auto",
        optimizer={"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        zero_optimization={"reduce_bucket_size": "auto", "stage3_max_live_parameters": "auto"},
    )
    found = check_json(config, JsonContext(world_size=8, fills_auto=True))
    assert {finding.rule for finding in found} == {"TC209", "TC227"}
    wrong = [finding.key for finding in found if finding.is_error]
    assert wrong == ["zero_optimization.stage3_max_live_parameters"]


def test_the_same_json_without_anybody_to_fill_it_in():
    found = check_json(changed(train_batch_size="auto"), CUDA)
    assert [finding.rule for finding in found] == ["TC208"]


def test_an_mpu_counts_the_data_parallel_ranks():
    config = changed(train_batch_size=4, tensor_parallel={"autotp_size": 2})
    assert "TC221" in rules_of(config)
    with_mpu = JsonContext(world_size=8, data_parallel_size=4, accelerator=Accelerator.cuda)
    assert not rules_of(config, with_mpu)


def test_without_a_world_size_the_batch_is_checked_as_far_as_it_goes():
    config = changed(train_batch_size=7, train_micro_batch_size_per_gpu=2)
    assert "TC221" in rules_of(config, JsonContext())
    assert "TC221" not in rules_of(changed(train_batch_size=7), JsonContext())


def test_deprecated_and_other_names_count_as_the_key_itself():
    case = Case({"zero_optimization": {"stage": 2, "cpu_offload": True}})
    assert case.offload_device == "cpu"
    case = Case({"bfloat16": {"enabled": True}})
    assert case.weights == "bf16"
    case = Case({"zero_optimization": {"max_live_parameters": 5}})
    assert case.get("zero_optimization.stage3_max_live_parameters") == 5


def test_a_name_with_a_dot_is_no_path():
    assert rules_of({**GOOD, "zero_optimization.stage": 2}) == {"TC204"}


def test_every_key_of_the_schema_at_its_default_is_legal():
    for version in versions():
        schema = load(version)
        for key in schema.keys.values():
            if key.default is None or key.is_section or key.replaced or key.same_as:
                continue
            config: dict = {}
            level = config
            *parents, name = key.name.split(".")
            for parent in parents:
                level = level.setdefault(parent, {})
            level[name] = key.default
            names = {
                each.rule for each in check_json(config, JsonContext(), schema) if each.is_error
            }
            assert names <= {"TC220", "TC246", "TC262", "TC294"}, key
