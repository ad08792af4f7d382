"""Tests of the messages that a user reads about the commonest pitfalls of DeepSpeed.

These concern configurations and come before anything starts. Other pitfalls are tested elsewhere:
hidden devices and missing compilers in `test_hardware.py` and `hardware/`, variables that hosts do
not get in `launch/test_ssh.py`, exits and orphans in `launch/` and `e2e/`, resuming on another
layout and incomplete checkpoints in `train/test_restore.py`, `runs/test_checkpoints.py` and
`faults/`, and workers without Hydra in `test_imports.py`.
"""

from __future__ import annotations

import json

import pytest

from trainctl.cli.main import run

FILE = {"train_batch_size": 48, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW"}}
Z3 = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}

# What it is about, what the JSON has, the command line after it, and what is said.
IN_A_FILE = [
    (
        "batch sizes",
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
        },
        [
            "train_batch_size=64 but micro 4 x accumulation 2 x data-parallel ranks 6 = 48",
            "nearest legal: 48 (accumulation 2) or 72 (accumulation 3)",
        ],
    ),
    (
        "a typing mistake",
        {"zero_optimisation": {"stage": 2}},
        ["DeepSpeed has no key zero_optimisation", "did you mean zero_optimization?"],
    ),
    (
        "auto",
        {"zero_optimization": {"stage": 2, "allgather_bucket_size": "auto"}},
        ['zero_optimization.allgather_bucket_size is "auto", which nothing fills in'],
    ),
    (
        "a number",
        {"zero_optimization": {**Z3, "stage3_prefetch_bucket_size": 15099494.4}},
        [
            "zero_optimization.stage3_prefetch_bucket_size: 15099494.4 is not a whole number",
            "write 15099494",
        ],
    ),
    (
        "a number",
        {"optimizer": {"type": "AdamW", "params": {"lr": "1e-5"}}},
        ['lr="1e-5" is not a number', "write 1e-05, without quotes"],
    ),
    (
        "offload",
        {"zero_optimization": {**Z3, "offload_param": {"device": "nvme"}}},
        ["offload to nvme needs zero_optimization.offload_param.nvme_path"],
    ),
    (
        "offload",
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        [
            "zero_optimization.offload_param.device=cpu needs ZeRO stage 3, and it is 2",
            "DeepSpeed ignores it",
        ],
    ),
    (
        "recomputation",
        {"activation_checkpointing": {"partition_activations": True}},
        ["activation_checkpointing recomputes nothing by itself"],
    ),
    (
        "saved weights",
        {"zero_optimization": {"stage": 3}},
        [
            "save_16bit_model saves nothing at ZeRO stage 3",
            "stage3_gather_16bit_weights_on_model_save=true",
        ],
    ),
    (
        "schedule",
        {
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_num_steps": 2000, "total_num_steps": 1500},
            }
        },
        ["warmup 2000 > total 1500 optimizer steps"],
    ),
]

# The same for a configuration of trainctl's: overrides of a command.
IN_A_CONFIGURATION = [
    (
        "batch sizes",
        ["validate", "hardware=6xh100-80g", "training.steps=10", "training.global_batch_size=64"],
        ["train_batch_size=64 is not a multiple of micro 1 x data 6 = 6", "60 (accumulation 10)"],
    ),
    (
        "a typing mistake",
        ["validate", "optimizer.lrate=1"],
        ["there is no key optimizer.lrate", "optimizer.lr"],
    ),
    (
        "a typing mistake",
        ["validate", "recipe=tiny", "deepspeed.aio.quue_depth=4"],
        ["DeepSpeed has no key aio.quue_depth", "did you mean aio.queue_depth?"],
    ),
    (
        "origin of a value",
        ["config", "why", "optimizer.lr", "recipe=tiny", "optimizer.lr=1e-3"],
        ["optimizer.lr"],
    ),
    (
        "hosts",
        ["validate", "recipe=tiny", "hardware=4x2xcpu", "launcher=ssh"],
        ["launcher.kind=ssh needs the host name of each node (nodes: 4)"],
    ),
    (
        "nodes",
        ["validate", "recipe=tiny", "hardware=4x2xcpu"],
        ["launcher.kind=local starts one node, and the plan is for 4", "launcher=slurm"],
    ),
    (
        "device memory",
        ["estimate-memory", "recipe=7b-zero3", "hardware=1xrtx-4090-24g"],
        ["does not fit: a device needs", "what would fit:"],
    ),
    (
        "host memory",
        [
            "estimate-memory",
            "recipe=7b-zero3",
            "offload=cpu",
            "hardware=8xh100-80g",
            "hardware.host_memory_bytes=68719476736",
        ],
        ["does not fit: a machine needs 143.8 GiB of host memory"],
    ),
    (
        "offload",
        ["validate", "recipe=7b-zero3", "hardware=8xh100-80g", "offload=nvme"],
        ["offload to nvme needs offload.nvme_path"],
    ),
    (
        "schedule",
        ["validate", "recipe=tiny", "schedule.warmup_steps=2000"],
        ["schedule.warmup_steps=2000 is longer than the run"],
    ),
]


@pytest.mark.parametrize(("subject", "changes", "words"), IN_A_FILE)
def test_a_file_of_deepspeed_s(subject, changes, words, tmp_path, capsys):
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({**FILE, **changes}, indent=2))
    run(["validate", "--deepspeed", str(file), "--world-size", "6"])
    said = "".join(capsys.readouterr())
    for each in words:
        assert each in said, (subject, said)
    assert f"{file}:" in said


@pytest.mark.parametrize(("subject", "command", "words"), IN_A_CONFIGURATION)
def test_a_configuration(subject, command, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(command)
    said = "".join(capsys.readouterr())
    for each in words:
        assert each in said, (subject, said)
