"""torchtitan's TOML and the JSON of its newer form: batches, schedules, sharding, shapes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from trainctl.migration.configs.import_file import import_file
from trainctl.migration.configs.import_table import import_document
from trainctl.migration.configs.result import Why
from trainctl.migration.configs.tables import load_table

TOML = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
converters = ["float8"]
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-9
[lr_scheduler]
warmup_steps = 20
decay_ratio = 0.8
decay_type = "cosine"
min_lr_factor = 0.1
[training]
local_batch_size = 2
global_batch_size = 64
seq_len = 4096
max_norm = 2.0
steps = 100
dataset = "c4"
seed = 5
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
expert_parallel_degree = 1
[checkpoint]
enable = true
interval = 10
keep_latest_k = 2
async_mode = "async"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
[validation]
enable = true
dataset = "c4_validation"
freq = 25
steps = 10
[metrics]
log_freq = 5
enable_wandb = true
"""


def layer(heads=4, groups=2, width=96, moe=None):
    return {
        "attention": {
            "n_heads": heads,
            "n_kv_heads": groups,
            "head_dim": None,
            "rope": {"theta": 500000, "scaling": "llama", "max_context_length": 1024},
        },
        "feed_forward": {"w1": {"out_features": width}},
        "moe": moe,
    }


def dump(**changes):
    """Return a small dump of the newer form; `changes` replace whole sections."""
    model = {
        "dim": 32,
        "vocab_size": 300,
        "norm": {"eps": 1e-5},
        "layers": [layer(), layer()],
        "enable_weight_tying": True,
    }
    return {
        "model_spec": {"name": "llama3", "flavor": "tiny", "model": model},
        "hf_assets_path": "./assets",
        "optimizer": {
            "param_groups": [
                {
                    "pattern": ".*",
                    "optimizer_name": "AdamW",
                    "optimizer_kwargs": {"lr": 1e-3, "betas": [0.8, 0.9], "weight_decay": 0.3},
                }
            ],
            "implementation": "fused",
        },
        "lr_scheduler": {"warmup_steps": 2, "decay_ratio": None, "decay_type": "linear"},
        "training": {
            "num_tokens_per_microbatch_per_dp_rank": 2048,
            "num_tokens_per_train_step": -1,
            "max_context_length": 512,
            "steps": 10,
            "dtype": "float32",
            "mixed_precision_param": "bfloat16",
        },
        "activation_checkpoint": {"preserve_rng_state": True},
        "loss": {"num_chunks": 8},
        "dataloader": {"dataset": {"source": {"path": "json", "split": "train"}}, "shuffle": True},
        **changes,
    }


def convert(document):
    return import_document(load_table("torchtitan"), document, folder=Path())


def left(result, why=Why.left):
    return {each.key: each for each in result.left_out if each.why is why}


def test_a_toml_is_a_run(tmp_path):
    (tmp_path / "llama3_8b.toml").write_text(TOML)
    result = import_file(tmp_path / "llama3_8b.toml")
    assert result.tool == "torchtitan" and not left(result, Why.unknown)
    assert result.choices == {
        "model": "llama-8b",
        "tokenizer": "hf",
        "optimizer": "adamw",
        "schedule": "wsd",
        "precision": "fp8",
        "engine": "deepspeed",  # fsdp2 has no fp8
        "zero_stage": "3",
        "activation_checkpointing": "full",
        "data": "files",
    }
    expected = {
        "optimizer.lr": 3e-4,
        "optimizer.epsilon": 1e-9,
        "optimizer.beta2": 0.95,
        "optimizer.gradient_clipping": 2.0,
        "schedule.warmup_steps": 20,
        "schedule.decay_steps": 80,
        "schedule.decay_shape": "cosine",
        "schedule.floor_ratio": 0.1,
        "activation_checkpointing.every_kth_block": 2,
        "training.micro_batch_size": 2,
        "training.global_batch_size": 64,
        "training.sequence_length": 4096,
        "training.seed": 5,
        "training.evaluate_every_steps": 25,
        "data.held_out_paths": ["hf://datasets/allenai/c4/en/c4-validation.*.json.gz"],
        "checkpoint.every_steps": 10,
        "checkpoint.keep": 2,
        "checkpoint.asynchronous": True,
        "logging.to": ["wandb"],
        "logging.every_steps": 5,
        "tokenizer.path": "./assets/hf/Llama-3.1-8B",
    }
    assert {key: result.settings.get(key) for key in expected} == expected
    assert {*left(result)} == {"validation.steps"}
    assert result.missing == ()


def test_a_dump_is_a_run_of_its_shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dump()))
    result = import_file(tmp_path / "config.json", world_size=2)
    assert result.tool == "torchtitan" and not left(result, Why.unknown)
    expected = {
        "model.vocab_size": 300,
        "model.hidden_size": 32,
        "model.intermediate_size": 96,
        "model.num_layers": 2,
        "model.num_key_value_heads": 2,
        "model.head_dim": 8,
        "model.tie_word_embeddings": True,
        "model.rope_theta": 500000.0,
        "optimizer.lr": 1e-3,
        "optimizer.beta1": 0.8,
        "optimizer.weight_decay": 0.3,
        "optimizer.decay_embeddings": True,
        "kernels.cross_entropy": "chunked",
        "training.sequence_length": 512,
        "training.micro_batch_size": 4,  # 2048 tokens
        "training.gradient_accumulation_steps": 1,
        "schedule.floor_ratio": 0.0,
    }
    assert {key: result.settings.get(key) for key in expected} == expected
    assert result.choices["engine"] == "fsdp2" and result.choices["schedule"] == "linear"
    assert result.choices["activation_checkpointing"] == "full"
    told = left(result)
    assert "scaling of positions" in told["model_spec.model"].reason
    assert "data.paths" in told["dataloader.dataset.source.path"].nearest


@pytest.mark.parametrize(
    "section, expected",
    [
        (None, "none"),
        ({"debug": False}, "full"),
        ({"force_recompute_mm_shapes_by_fqns": ["router"]}, "selective"),
        ({"memory_budget": 0.5}, "selective"),
    ],
)
def test_a_dump_does_not_name_its_recomputation(section, expected):
    result = convert(dump(activation_checkpoint=section))
    assert result.choices["activation_checkpointing"] == expected


def test_models_without_a_closed_form_need_their_directory():
    model = dump()["model_spec"]["model"] | {"layers": [layer(moe={"experts": 4})]}
    result = convert(dump(model_spec={"name": "qwen3", "flavor": "30B-A3B", "model": model}))
    assert result.choices["model"] == "hf" and result.settings["model.path"] == "./assets"
    assert result.settings["model.weights"] == "random"
    assert {"model_spec.name", "model_spec.flavor"} <= {*left(result)}
    loaded = convert({"model": {"name": "deepseek_v3", "flavor": "16B", "hf_assets_path": "d"},
                      "checkpoint": {"initial_load_in_hf": True}})  # fmt: skip
    assert loaded.settings["model.weights"] == "pretrained"
    older = convert({"model": {"name": "llama3", "flavor": "debugmodel", "tokenizer_path": "t"}})
    assert {"model.flavor", "model.tokenizer_path"} <= {*left(older)}


@pytest.mark.parametrize(
    "scheduler, expected",
    [
        ({"decay_ratio": 0.0}, {"schedule": "constant"}),
        ({"decay_type": "cosine"}, {"schedule": "cosine", "schedule.floor_ratio": 0.0}),
        (
            {"decay_ratio": 0.2, "decay_type": "sqrt", "lr_min": 0.05},
            {
                "schedule": "wsd",
                "schedule.decay_steps": 20,
                "schedule.decay_shape": "one_minus_sqrt",
                "schedule.floor_ratio": 0.05,
            },
        ),
        ({"decay_type": "sqrt"}, {"schedule": "wsd", "schedule.decay_steps": 80}),
    ],
)
def test_schedules(scheduler, expected):
    scheduler = {"warmup_steps": 20, **scheduler}
    result = convert({"training": {"steps": 100, "seq_len": 8}, "lr_scheduler": scheduler})
    told = {**result.choices, **result.settings}
    assert {key: told.get(key) for key in expected} == expected
    assert told["schedule.warmup_steps"] == 20


def test_pipelines_accumulate_their_micro_batches():
    text = """
    [training]
    batch_size = 8
    seq_len = 64
    tensor_parallel_degree = 2
    compile = true
    enable_float8_linear = true
    [experimental]
    pipeline_parallel_degree = 2
    pipeline_parallel_microbatches = 4
    pipeline_parallel_schedule = "Interleaved1F1B"
    context_parallel_degree = 2
    [parallelism]
    expert_parallel_degree = 4
    """
    result = convert(tomllib.loads(text))
    assert result.settings["training.micro_batch_size"] == 2
    assert result.settings["training.gradient_accumulation_steps"] == 4
    assert result.settings["parallelism.pipeline"] == 2
    assert result.settings["parallelism.expert"] == 2  # there it contains the tensor ranks
    assert result.settings["parallelism.sequence_sharded_norms"] is True
    assert result.settings["parallelism.context"] == 2
    assert result.choices["engine"] == "deepspeed" and result.choices["zero_stage"] == "1"
    assert result.choices["precision"] == "bf16"
    assert {
        "experimental.pipeline_parallel_schedule",
        "training.compile",
        "training.enable_float8_linear",
    } <= {*left(result)}
    tokens = dump(
        parallelism={
            "pipeline_parallel_degree": 2,
            "num_pp_microbatches": 3,
            "pipeline_parallel_schedule": "DualPipeV",
        }
    )
    assert convert(tokens).settings["training.gradient_accumulation_steps"] == 3
    assert convert(tokens).settings["parallelism.pipeline_schedule"] == "dualpipev"


def test_sharding_copies_and_formats():
    def chosen(**sections):
        result = convert({"training": {"seq_len": 8, "steps": 1}} | sections)
        return result.choices["engine"], result.choices["zero_stage"], result.choices["precision"]

    assert chosen(parallelism={"data_parallel_shard_degree": 1}) == ("deepspeed", "0", "bf16")
    never = {"fsdp_reshard_after_forward": "never", "data_parallel_shard_degree": 4}
    assert chosen(parallelism=never) == ("fsdp2", "2", "bf16")
    whole = {"training": {"seq_len": 8, "steps": 1, "mixed_precision_param": "float32"}}
    assert chosen(**whole) == ("fsdp2", "3", "fp32")
    whole["training"]["dtype"] = "bfloat16"
    assert chosen(**whole) == ("deepspeed", "3", "bf16-low-memory")
    hybrid = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 4}
    told = convert({"training": {"seq_len": 8, "steps": 1}, "parallelism": hybrid})
    assert told.choices["engine"] == "fsdp2" and told.settings["zero_stage.shard_group_size"] == 4
    hybrid["data_parallel_shard_degree"] = -1  # all that the copies leave: not known here
    told = convert({"training": {"seq_len": 8, "steps": 1}, "parallelism": hybrid})
    assert "parallelism.data_parallel_shard_degree" in left(told)
    off = convert({"training": {"seq_len": 8, "steps": 1}})
    assert off.settings["checkpoint.at_end"] is False
    assert off.settings["training.evaluation_samples"] == 0
