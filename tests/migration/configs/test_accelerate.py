"""accelerate's default_config.yaml: machines, engines, formats, and the files that it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import ClusterConfig

from trainctl.migration.configs.import_file import import_file
from trainctl.migration.configs.import_table import import_document
from trainctl.migration.configs.result import Why
from trainctl.migration.configs.tables import load_table


def convert(document, folder=Path(), **settings):
    return import_document(load_table("accelerate"), {**document, **settings}, folder=folder)


def left(result, why=Why.left):
    return {each.key: each for each in result.left_out if each.why is why}


def test_a_file_that_accelerate_writes_has_no_unknown_key(tmp_path):
    """accelerate itself makes the file, of every kind of engine."""
    for number, config in enumerate(
        (
            {"distributed_type": "MULTI_GPU", "num_processes": 4, "fp8_config": {"backend": "AO"}},
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}},
            {"distributed_type": "MEGATRON_LM", "megatron_lm_config": {"megatron_lm_pp_degree": 2}},
        )
    ):
        made = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "bf16", **config}
        made |= {"use_cpu": False, "debug": False}
        file = tmp_path / f"{number}.yaml"
        ClusterConfig(**made).to_yaml_file(str(file))
        result = import_file(file)
        assert result.tool == "accelerate"
        assert not left(result, Why.unknown) and result.choices["precision"] == "bf16"
        assert {each.key for each in result.missing} <= {
            "model.path",
            "data.paths",
            "training.steps",
            "training.global_batch_size",
        }


def test_deepspeed_by_its_keys():
    section = {
        "zero_stage": 3,
        "offload_optimizer_device": "nvme",
        "offload_param_device": "cpu",
        "offload_optimizer_nvme_path": "/scratch",
        "offload_param_nvme_path": "/other",
        "gradient_accumulation_steps": 16,
        "gradient_clipping": 0.5,
        "zero3_save_16bit_model": True,
        "deepspeed_multinode_launcher": "pdsh",
        "deepspeed_hostfile": "hosts",
        "deepspeed_inclusion_filter": "a@b",
    }
    document = {"distributed_type": "DEEPSPEED", "deepspeed_config": section}
    result = convert(document, num_machines=2, num_processes=16, mixed_precision="bf16")
    assert result.choices["engine"] == "deepspeed" and result.choices["zero_stage"] == "3"
    assert result.choices["launcher"] == "ssh" and result.choices["model"] == "hf"
    assert result.settings == {
        "optimizer.gradient_clipping": 0.5,
        "offload.optimizer": "nvme",
        "offload.parameters": "cpu",
        "offload.nvme_path": "/scratch",
        "training.gradient_accumulation_steps": 16,
        "launcher.hostfile": "hosts",
        "launcher.include": "a@b",
        "hardware.nodes": 2,
        "hardware.devices_per_node": 8,
    }
    assert {*left(result)} == {"deepspeed_config.zero3_save_16bit_model"}
    assert "deepspeed_config.offload_param_nvme_path" in left(result, Why.ignored)
    alone = convert({**document, "num_machines": 1})
    assert "launcher.hostfile" not in alone.settings


def test_deepspeed_by_a_file(tmp_path):
    config = {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000000},
        "bf16": {"enabled": True},
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "gradient_accumulation_steps": 4,
        "amp_typo": 1,
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    document = {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": "ds.json", "zero3_init_flag": True},
    }
    result = convert(document, tmp_path)
    assert result.choices["zero_stage"] == "2" and result.choices["precision"] == "bf16"
    assert result.settings["zero_stage.reduce_bucket_size"] == 1000000
    assert result.settings["training.gradient_accumulation_steps"] == 4
    assert any("amp_typo" in key for key in left(result) | left(result, Why.unknown))
    (tmp_path / "ds.json").unlink()
    gone = convert(document, tmp_path)
    assert "no readable JSON" in left(gone)["deepspeed_config.deepspeed_config_file"].reason
    (tmp_path / "ds.json").write_text(
        '{"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2}'
    )
    wrong = convert(document, tmp_path)
    assert "refuses" in left(wrong)["deepspeed_config.deepspeed_config_file"].reason


@pytest.mark.parametrize(
    "section, parallel, expected",
    [
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, {}, ("fsdp2", "3", None)),
        ({"fsdp_sharding_strategy": 2}, {}, ("fsdp2", "2", None)),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, {}, ("deepspeed", "0", None)),
        ({"fsdp_reshard_after_forward": False}, {}, ("fsdp2", "2", None)),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, {}, ("fsdp2", "2", None)),
        ({"fsdp_offload_params": True}, {}, ("fsdp2", "3", "cpu-all")),
        ({}, {"parallelism_config_tp_size": 2}, ("deepspeed", "3", None)),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, {}, ("fsdp2", "3", None)),
    ],
)
def test_sharding(section, parallel, expected):
    document = {"distributed_type": "FSDP", "fsdp_config": section, "mixed_precision": "bf16"}
    result = convert(document, parallelism_config=parallel)
    choices = result.choices
    assert (choices["engine"], choices["zero_stage"], choices.get("offload")) == expected
    is_hybrid = section.get("fsdp_sharding_strategy") == "HYBRID_SHARD"
    assert ("fsdp_config.fsdp_sharding_strategy" in left(result)) == is_hybrid


@pytest.mark.parametrize(
    "section, numbers, size",
    [
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, {}, 8),
        ({}, {"parallelism_config_dp_replicate_size": 4}, 4),
        ({}, {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 8}, 8),
    ],
)
def test_shard_groups(section, numbers, size):
    document = {"distributed_type": "FSDP", "fsdp_config": section, "mixed_precision": "bf16"}
    result = convert(document, num_machines=2, num_processes=16, parallelism_config=numbers)
    assert result.choices["engine"] == "fsdp2"
    assert result.settings["zero_stage.shard_group_size"] == size and not left(result)


def test_other_devices_formats_and_compilers():
    result = convert(
        {
            "distributed_type": "MULTI_XPU",
            "num_machines": 3,
            "num_processes": 8,
            "mixed_precision": "int4",
            "dynamo_backend": "INDUCTOR",
            "compute_environment": "AMAZON_SAGEMAKER",
            "deepspeed_config": {},
            "tpu_use_sudo": False,
            "mpirun_config": {"mpirun_hostfile": "hosts"},
            "deepspeeed_config": {"zero_stage": 2},
        }
    )
    assert {*left(result)} == {
        "distributed_type",
        "num_processes",
        "mixed_precision",
        "compute_environment",
    }
    assert {*left(result, Why.unknown)} == {"deepspeeed_config.zero_stage"}
    assert result.choices["kernels"] == "compiled" and result.choices["launcher"] == "mpi"
    half = convert({"distributed_type": "MULTI_GPU", "mixed_precision": "fp16"})
    assert half.choices["zero_stage"] == "1"  # whole states in fp16 are refused
    cpu = convert({"distributed_type": "MULTI_CPU", "num_processes": 2, "use_cpu": True})
    assert cpu.choices["hardware"] == "cpu" and cpu.settings["hardware.devices_per_node"] == 2


def test_axes_of_megatron_and_of_sequences():
    document = {"distributed_type": "MEGATRON_LM", "num_processes": 8}
    megatron = {
        "megatron_lm_tp_degree": 2,
        "megatron_lm_pp_degree": 2,
        "megatron_lm_sequence_parallelism": True,
        "megatron_lm_use_distributed_optimizer": True,
        "megatron_lm_recompute_activations": True,
        "megatron_lm_some_flag": 1,
    }
    result = convert(document, megatron_lm_config=megatron)
    assert result.settings["parallelism.tensor"] == 2
    assert result.settings["parallelism.sequence_sharded_norms"] is True
    assert result.choices["zero_stage"] == "1"
    assert result.choices["activation_checkpointing"] == "selective"
    assert {*left(result)} == {"megatron_lm_config.megatron_lm_some_flag"}
    sequence = {
        "parallelism_config_sp_size": 4,
        "parallelism_config_sp_seq_length": 8192,
        "parallelism_config_sp_attn_implementation": "flash_attention_2",
        "parallelism_config_cp_size": 2,
    }
    result = convert({"distributed_type": "DEEPSPEED"}, parallelism_config=sequence)
    assert result.settings["parallelism.sequence"] == 4
    assert result.settings["training.sequence_length"] == 8192
    assert result.settings["model.attention"] == "flash_attention_2"
    assert result.settings["parallelism.context"] == 2 and not left(result)
