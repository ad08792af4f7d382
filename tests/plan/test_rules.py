"""Every rule fires on the config that it is for, and on no legal one."""

from __future__ import annotations

import pytest
from plan_cases import config_with, cpus, gpus, keys

from trainctl.config.schema import RunConfig
from trainctl.errors import Severity
from trainctl.plan.resolve import resolve
from trainctl.plan.rules import RULES

OFFLOAD = {"zero_stage__stage": 3, "offload__optimizer": "cpu"}
NVME = {"zero_stage__stage": 3, "offload__optimizer": "nvme"}

# Rule, changes, hardware, part of the message, part of the hint.
ERRORS = [
    ("TC001", {"parallelism__tensor": 4}, gpus(6), "4 does not divide the 6", "use 4 or 8"),
    ("TC001", {"parallelism__data": 3}, gpus(8), "has 8 devices", "parallelism.data=8"),
    ("TC003", {"parallelism__tensor": 8}, gpus(8), "num_attention_heads=4", "tensor=4"),
    (
        "TC003",
        {"model__num_key_value_heads": 2, "parallelism__tensor": 4},
        gpus(8),
        "num_key_value_heads=2",
        "parallelism.tensor=2",
    ),
    ("TC004", {"parallelism__sequence": 8}, gpus(8), "num_attention_heads=4", "sequence=4"),
    (
        "TC004",
        {
            "model__num_attention_heads": 12,
            "model__num_key_value_heads": 4,
            "model__head_dim": 32,
            "parallelism__sequence": 6,
        },
        gpus(6),
        "neither divides the other",
        "sequence=4",
    ),
    (
        "TC005",
        {"parallelism__sequence": 4, "training__sequence_length": 2046},
        gpus(8),
        "not a multiple of parallelism.sequence=4",
        "sequence_length=2044 or 2048",
    ),
    ("TC006", {"parallelism__pipeline": 8}, gpus(8), "8 stages", "parallelism.pipeline=4"),
    (
        "TC008",
        {"parallelism__pipeline": 2, "parallelism__sequence": 2},
        gpus(8),
        "no sequence axis",
        "parallelism.sequence=1",
    ),
    ("TC009", {"parallelism__expert": 2}, gpus(8), "no experts", "parallelism.expert=1"),
    (
        "TC009",
        {"parallelism__expert": 3, "model__family": "hf", "model__path": "m"},
        gpus(8),
        "data-parallel size 8",
        "expert=2 or 4",
    ),
    ("TC010", {"model__attention": "flash_attention_2"}, cpus(), "needs a GPU", "sdpa"),
    (
        "TC020",
        {"training__global_batch_size": 20},
        gpus(8),
        "not a multiple of micro 1 x data 8",
        "16 (accumulation 2) or 24 (accumulation 3)",
    ),
    (
        "TC020",
        {"training__global_batch_size": 20, "training__gradient_accumulation_steps": 2},
        gpus(8),
        "not a multiple of accumulation 2 x data 8",
        "16 (micro 1) or 32 (micro 2)",
    ),
    (
        "TC020",
        {"training__global_batch_size": 4, "training__micro_batch_size": 1},
        gpus(8),
        "train_batch_size=4",
        "nearest legal: 8 (accumulation 1)",
    ),
    ("TC021", {"training__sequence_length": 4096}, gpus(), "=2048", "sequence_length=2048"),
    ("TC022", {"training__steps": None}, gpus(), "neither", "training.steps="),
    ("TC025", {"schedule__kind": "cyclic"}, gpus(), "step_every", "step_every=33"),
    (
        "TC025",
        {"schedule__kind": "exponential", "schedule__floor_ratio": 0.0},
        gpus(),
        "never reaches 0",
        "floor_ratio=0.01",
    ),
    (
        "TC030",
        {"parallelism__pipeline": 2, "zero_stage__stage": 2},
        gpus(),
        "ZeRO 0 and 1 only",
        "zero_stage=1",
    ),
    (
        "TC031",
        {"parallelism__pipeline": 2, "zero_stage__stage": 0},
        gpus(),
        "own norm",
        "gradient_clipping=0",
    ),
    ("TC032", {"offload__parameters": "cpu"}, gpus(), "stage 3, and it is 1", "zero_stage=3"),
    (
        "TC032",
        {"offload__optimizer": "cpu", "zero_stage__stage": 0},
        gpus(),
        "stage 1 or more",
        "zero_stage=1",
    ),
    (
        "TC032",
        {"offload__optimizer": "nvme", "offload__nvme_path": "/n"},
        gpus(),
        "host memory instead",
        "offload.optimizer=cpu",
    ),
    (
        "TC032",
        {"offload__optimizer": "cpu", "offload__ratio": 0.5},
        gpus(),
        "offload.ratio=0.5",
        "offload.ratio=1",
    ),
    ("TC033", NVME, gpus(), "needs offload.nvme_path", "offload.nvme_path="),
    ("TC034", {**OFFLOAD, "optimizer__kind": "lamb"}, gpus(), "no CPU kernel", "adamw"),
    (
        "TC034",
        {**OFFLOAD, "optimizer__kind": "sgd", "offload__ratio": 0.5},
        gpus(),
        "not sgd",
        "offload.ratio=1",
    ),
    ("TC035", {"offload__zenflow": True}, gpus(), "it is none", "offload.optimizer=cpu"),
    ("TC035", {"offload__super_offload": True}, gpus(), "none and 1", "zero_stage=3"),
    ("TC035", {**OFFLOAD, "offload__super_offload": True}, cpus(), "for CUDA", "=false"),
    (
        "TC036",
        {"zero_stage__allgather_bucket_size": 1001},
        gpus(),
        "1001 is odd",
        "allgather_bucket_size=1000 or 1002",
    ),
    (
        "TC037",
        {"zero_stage__stage": 3, "zero_stage__hpz_partition_size": 3},
        gpus(8),
        "8 devices",
        "hpz_partition_size=2 or 4",
    ),
    (
        "TC038",
        {"zero_stage__stage": 3, "zero_stage__quantized_weights": True},
        cpus(),
        "GPU kernels",
        "quantized_weights=false",
    ),
    (
        "TC039",
        {"zero_stage__stage": 3, "optimizer__kind": "muon"},
        gpus(),
        "zero_stage.reduce_scatter",
        "reduce_scatter=false",
    ),
    ("TC050", {}, gpus(supports_bf16=False), "compute=bf16", "precision=fp16"),
    ("TC050", {"precision__compute": "fp16"}, cpus(), "on the CPU", "precision=bf16"),
    ("TC050", {"precision__compute": "fp8"}, cpus(), "in fp8", "precision=bf16"),
    (
        "TC051",
        {"precision__gradient_accumulation": "fp32", "zero_stage__stage": 0},
        gpus(),
        "needs ZeRO",
        "zero_stage=1",
    ),
    (
        "TC051",
        {"precision__gradient_accumulation": "fp16"},
        gpus(),
        "weights are bf16",
        "=bf16 or fp32",
    ),
    ("TC052", {"precision__communication": "fp8"}, gpus(), "fp8", "communication=bf16"),
    (
        "TC053",
        {"precision__autocast": True, "precision__compute": "fp32"},
        gpus(),
        "is fp32",
        "compute=bf16",
    ),
    ("TC054", {"precision__master_weights": "fp16"}, gpus(), "are bf16", "fp32 or bf16"),
    ("TC054", {"precision__master_weights": "bf16"}, gpus(), "too", "optimizer_states=bf16"),
    ("TC054", {"precision__optimizer_states": "bf16"}, gpus(), "needs", "master_weights=bf16"),
    ("TC054", {"precision__optimizer_states": "fp8"}, gpus(), "not kept", "adamw_8bit"),
    (
        "TC054",
        {
            "precision__master_weights": "bf16",
            "precision__optimizer_states": "bf16",
            "zero_stage__stage": 0,
        },
        gpus(),
        "needs ZeRO",
        "zero_stage=1",
    ),
    (
        "TC054",
        {"precision__compute": "fp16", "precision__master_weights": "fp16"},
        gpus(),
        "host memory",
        "offload.optimizer=cpu",
    ),
    (
        "TC055",
        {"optimizer__kind": "lamb", "precision__compute": "fp16", "precision__loss_scale": 128.0},
        gpus(),
        "adaptive",
        "loss_scale=0",
    ),
    ("TC056", {"optimizer__kind": "lion"}, cpus(), "GPU kernel", "optimizer=adamw"),
    ("TC056", {"optimizer__kind": "lamb"}, cpus(), "GPU kernel", "optimizer=adamw"),
    ("TC070", {"model__family": "hf"}, gpus(), "config.json", "model.path="),
    ("TC071", {"model__hidden_size": 130}, gpus(), "=130", "hidden_size=128 or 132"),
    ("TC071", {"model__num_key_value_heads": 3}, gpus(), "=3 does not divide", "=4"),
    (
        "TC071",
        {"model__family": "gpt2", "model__num_key_value_heads": 2},
        gpus(),
        "grouped-query",
        "leave it out",
    ),
    (
        "TC071",
        {"model__family": "gpt2", "model__head_dim": 64},
        gpus(),
        "share model.hidden_size=128 evenly",
        "head_dim=32",
    ),
    ("TC072", {"model__vocab_size": 256}, gpus(), "257", "vocab_size=257"),
    ("TC073", {"tokenizer__kind": "hf"}, gpus(), "tokenizer.path", "directory"),
    ("TC074", {"data__kind": "files"}, gpus(), "data.paths", "data.paths="),
    ("TC075", {"checkpoint__best_of": "accuracy"}, gpus(), "no metric", "best_of=loss"),
    ("TC077", {}, gpus(8, nodes=2), "starts one node", "launcher=slurm"),
    ("TC077", {"launcher__kind": "ssh"}, gpus(8, nodes=2), "host name", "launcher.hosts="),
    (
        "TC077",
        {"launcher__kind": "ssh", "launcher__hosts": ["a"]},
        gpus(8, nodes=2),
        "names 1 hosts",
        "name 2 hosts",
    ),
    (
        "TC077",
        {"launcher__kind": "ssh", "launcher__hosts": ["a"], "launcher__hostfile": "h"},
        gpus(8),
        "both set",
        "leave one",
    ),
    ("TC078", {"logging__deepspeed_level": "loud"}, gpus(), "loud", "warning"),
    ("TC090", {"deepspeed": {"gradient_cliping": 1}}, gpus(), "no key", "gradient_clipping?"),
    ("TC090", {"deepspeed": {"elasticity": {}}}, gpus(), "removed", "use train_batch_size"),
    (
        "TC090",
        {"deepspeed": {"zero_optimization": {"mics_shard_size": 2}}},
        gpus(),
        "zero_optimization.mics_shard_size has been removed",
        "use zero_optimization.zero_hpz_partition_size",
    ),
    (
        "TC090",
        {"deepspeed": {"zero_optimization": {"round_robin_gradient": True}}},
        gpus(),
        "no key zero_optimization.round_robin_gradient",
        "zero_optimization.round_robin_gradients?",
    ),
    ("TC091", {"deepspeed": {"aio": {"queue_depth": "auto"}}}, gpus(), '"auto"', "give the value"),
    (
        "TC092",
        {"deepspeed": {"fp16": {"enabled": True}}},
        gpus(),
        "deepspeed.fp16.enabled=True contradicts fp16.enabled=False, which comes from: "
        "precision.compute=bf16",
        "fp16.enabled",
    ),
    ("TC092", {"deepspeed": {"scheduler": {}}}, gpus(), "trainctl's to set", "schedule group"),
    ("TC092", {"deepspeed": {"zero_optimization": True}}, gpus(), "contradicts", "leave"),
]

WARNINGS = [
    ("TC024", {"schedule__warmup_steps": 101}, gpus(), "longer than the run of 100 steps"),
    ("TC002", {"parallelism__tensor": 4, "launcher__kind": "slurm"}, gpus(6, nodes=2), "4"),
    ("TC007", {"parallelism__pipeline": 4}, gpus(), "idle 75%"),
    ("TC023", {"training__stop_after_steps": 101}, gpus(), "end of the run at step 100"),
    ("TC076", {"checkpoint__at_end": False}, gpus(), "no checkpoint"),
    ("TC079", {"optimizer__kind": "adafactor"}, gpus(), "saves no memory"),
    ("TC099", {"training__tokens": 1000}, gpus(), "training.steps=null"),
]


def findings_of(rule, changes, hardware):
    resolution = resolve(config_with(**changes), hardware)
    return resolution, [finding for finding in resolution.findings if finding.rule == rule]


@pytest.mark.parametrize(("rule", "changes", "hardware", "message", "hint"), ERRORS)
def test_an_error_says_what_is_wrong_and_what_would_be_right(
    rule, changes, hardware, message, hint
):
    resolution, found = findings_of(rule, changes, hardware)
    assert resolution.plan is None
    assert any(message in finding.message and hint in finding.hint for finding in found), found
    assert all(finding.severity is Severity.error for finding in found)
    for finding in found:
        top = finding.key.split(".")[0]
        assert finding.key in keys(RunConfig()) or top in ("deepspeed", "parallelism")


@pytest.mark.parametrize(("rule", "changes", "hardware", "message"), WARNINGS)
def test_a_warning_leaves_the_plan(rule, changes, hardware, message):
    resolution, found = findings_of(rule, changes, hardware)
    assert resolution.plan is not None, resolution.findings
    assert any(message in finding.message for finding in found), resolution.findings
    assert all(finding.severity is Severity.warning for finding in found)


def test_every_rule_has_a_case_here():
    assert {rule for rule, _ in RULES} == {case[0] for case in [*ERRORS, *WARNINGS]}


def test_identifiers_are_unique_and_in_order():
    identifiers = [identifier for identifier, _ in RULES]
    assert identifiers == sorted(set(identifiers))


def test_every_rule_says_in_its_docstring_what_it_holds():
    assert all(rule.__doc__ for _, rule in RULES)


@pytest.mark.parametrize("hardware", [cpus(1), cpus(2), gpus(1), gpus(8)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_plain_config_has_no_findings(hardware, stage):
    assert resolve(config_with(zero_stage__stage=stage), hardware).findings == ()


def test_all_problems_are_found_in_one_go_even_without_a_mesh():
    config = config_with(
        parallelism__tensor=3,
        training__steps=None,
        tokenizer__kind="file",
        precision__compute="fp8",
        deepspeed={"fp16": {"enabled": True}, "train_batch_size": 7, "zero_optimisation": {}},
    )
    rules = [finding.rule for finding in resolve(config, cpus(2)).findings]
    assert {"TC001", "TC003", "TC022", "TC050", "TC073", "TC090", "TC092"} <= set(rules)
