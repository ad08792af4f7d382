"""GPT-NeoX's files become runs: the shape, the schedule's end, ZeRO's section, tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from trainctl.errors import TrainctlError
from trainctl.migration.configs.conversions.gpt_neox import feed_forward_width
from trainctl.migration.configs.import_file import import_file
from trainctl.migration.configs.import_table import Conversion, import_document
from trainctl.migration.configs.result import Why
from trainctl.migration.configs.tables import load_table

LLAMA = """{
  # a comment, and words of Python's, as NeoX writes them
  "pipe-parallel-size": 0, "model-parallel-size": 2, "make_vocab_size_divisible_by": 64,
  "num-layers": 4, "hidden_size": 256, "num_attention_heads": 8, "num_kv_heads": 4,
  "seq_length": 512, "max_position_embeddings": 1024,
  "norm": "rmsnorm", "rms_norm_epsilon": 1.0e-6, "pos_emb": "rotary", "rotary_pct": 1,
  "activation": "swiglu", "mlp_multiple_of": 32, "intermediate_size": 1000,
  "no_weight_tying": True, "use_bias_in_norms": false, "use_bias_in_attn_linear": false,
  "use_bias_in_mlp": False, "sequence_parallel": true,
  "attention_config": [[["flash"], 4]], "init_method": "small_init",
}"""

TRAINING = """
optimizer: {type: Adam, params: {lr: 4.0e-4, betas: [0.9, 0.98], eps: 1e-6}}
zero_optimization: {stage: 1, reduce_bucket_size: 1000000, cpu_offload: false}
fp16: {fp16: true, enabled: true, initial_scale_power: 12, loss_scale: 0}
min_lr: 4.0e-5
lr_decay_style: cosine
warmup: 0.05
train_iters: 2000
lr_decay_iters: 2000
train_micro_batch_size_per_gpu: 4
gradient_accumulation_steps: 2
weight_decay: 0.05
gradient_clipping: 0.5
checkpoint_activations: true
partition_activations: true
data_path: data/enwik8_text_document
split: 95,4,1
vocab_file: tokenizer.json
tokenizer_type: HFTokenizer
checkpoint_factor: 100
keep_last_n_checkpoints: 2
eval_interval: 50
log_interval: 20
use_wandb: true
wandb_project: mine
num_gpus: 8
"""


@pytest.fixture
def files(tmp_path):
    tokenizer = {"model": {"vocab": {f"t{n}": n for n in range(100)}}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "llama.yml").write_text(LLAMA)
    (tmp_path / "train.yml").write_text(TRAINING)
    return [tmp_path / "llama.yml", tmp_path / "train.yml"]


def convert(text, **more):
    document = {**(yaml.safe_load(text) if isinstance(text, str) else text), **more}
    return import_document(load_table("gpt_neox"), document, folder=Path())


def left(result, why=Why.left):
    return {each.key: each for each in result.left_out if each.why is why}


def test_two_files_are_one_run(files):
    result = import_file(*files)
    assert result.tool == "gpt_neox" and not left(result, Why.unknown)
    assert result.choices == {
        "model": "llama-7b",
        "optimizer": "adamw",
        "schedule": "cosine",
        "precision": "fp16",
        "zero_stage": "1",
        "offload": "none",
        "activation_checkpointing": "full",
        "data": "tokens",
        "tokenizer": "file",
    }
    expected = {
        "model.vocab_size": 128,  # 100, padded to 64 for each of two tensor ranks
        "model.hidden_size": 256,
        "model.intermediate_size": 352,  # 2/3 of 1000, halved, up to a multiple of 32
        "model.num_layers": 4,
        "model.num_key_value_heads": 4,
        "model.max_position_embeddings": 1024,
        "model.tie_word_embeddings": False,
        "model.norm_epsilon": 1e-6,
        "model.attention": "flash_attention_2",
        "model.initializer_range": 0.039528,  # sqrt(2 / (5 * 256))
        "optimizer.lr": 4e-4,
        "optimizer.beta2": 0.98,
        "optimizer.epsilon": 1e-6,
        "optimizer.weight_decay": 0.05,
        "optimizer.decay_embeddings": True,
        "optimizer.gradient_clipping": 0.5,
        "schedule.floor_ratio": 0.1,
        "schedule.warmup_fraction": 0.05,
        "precision.initial_scale_power": 12,
        "zero_stage.reduce_bucket_size": 1000000,
        "parallelism.tensor": 2,
        "parallelism.pipeline": 1,
        "parallelism.sequence_sharded_norms": True,
        "data.paths": ["data/enwik8_text_document.bin"],
        "data.held_out_fraction": 0.04,
        "training.steps": 2000,
        "training.sequence_length": 512,
        "training.micro_batch_size": 4,
        "training.gradient_accumulation_steps": 2,
        "training.evaluate_every_steps": 50,
        "checkpoint.every_steps": 100,
        "checkpoint.keep": 2,
        "logging.to": ["wandb"],
        "logging.wandb.project": "mine",
        "hardware.devices_per_node": 8,
        "training.seed": 1234,
    }
    assert {key: result.settings.get(key) for key in expected} == expected
    assert result.missing == ()
    assert {each.key for each in result.findings} == {"data.paths", "tokenizer.path"}  # not here
    assert left(result) == {}
    assert {*left(result, Why.default)} == {"output_layer_init_method", "eval_iters"}


def test_keys_in_two_files_are_refused(files):
    files[0].write_text("train_iters: 1")
    with pytest.raises(TrainctlError, match="both have train_iters"):
        import_file(*files)


@pytest.mark.parametrize(
    "keys, width",
    [
        ({"hidden_size": 128}, 512),
        ({"hidden_size": 128, "expansion_factor": 3}, 384),
        ({"hidden_size": 4096, "intermediate_size": 32768, "activation": "swiglu",
          "mlp_multiple_of": 256}, 11008),
        ({"hidden_size": 4096, "activation": "geglu"}, 5461),
    ],
)  # fmt: skip
def test_widths_of_feed_forward_layers(keys, width):
    """11008 is Llama 7B's, as NeoX's configs/llama/7B.yml has it."""
    source = Conversion(load_table("gpt_neox"), keys, Path(), None)
    assert feed_forward_width(source) == width


def test_an_architecture_without_a_closed_form_is_named_with_its_config():
    shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "pos_emb": "rotary"}
    result = convert(shape, rotary_pct=0.25, gpt_j_residual=True, no_weight_tying=True)
    assert result.choices["model"] == "hf"
    why = left(result)["num_layers"]
    assert "pos_emb=rotary" in why.reason
    config = json.loads(why.nearest.partition("config.json of ")[2])
    assert config["model_type"] == "gpt_neox" and config["intermediate_size"] == 256
    from transformers import AutoConfig

    built = AutoConfig.for_model(**config)
    assert built.num_hidden_layers == 2 and built.use_parallel_residual


def test_gpt2_and_mistral():
    shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64}
    result = convert(shape)
    assert result.choices["model"] == "gpt2-124m"
    assert result.settings["model.vocab_size"] == 50304  # 50257, up to a multiple of 128
    assert result.settings["model.tie_word_embeddings"] is True
    mistral = yaml.safe_load(LLAMA) | {"sliding_window_width": 100}
    result = convert(mistral, padded_vocab_size=96)
    assert result.choices["model"] == "mistral-7b"
    assert result.settings["model.sliding_window"] == 100
    assert result.settings["model.vocab_size"] == 96


def test_a_vocabulary_that_nobody_says_is_missing(tmp_path):
    (tmp_path / "a.yml").write_text(LLAMA.replace("}", '"tokenizer_type": "HFTokenizer"}'))
    result = import_file(tmp_path / "a.yml")
    lacking = {"model.vocab_size", "data.paths", "training.steps"}
    assert lacking <= {each.key for each in result.missing}


def test_schedules_and_their_ends():
    base = {"optimizer": {"params": {"lr": 1e-3}}, "train_iters": 100}
    linear = convert(base, min_lr=1e-4)
    assert linear.choices["schedule"] == "linear" and "min_lr" in left(linear)
    constant = convert(base, lr_decay_style="constant", warmup_iters=7)
    assert constant.settings["schedule.warmup_steps"] == 7
    assert "schedule.floor_ratio" not in constant.settings
    exponential = convert(base, lr_decay_style="exponential")
    assert exponential.settings["schedule.floor_ratio"] == pytest.approx(0.5, abs=1e-3)
    shorter = convert(base, lr_decay_style="cosine", lr_decay_iters=50)
    assert "lr_decay_iters" in left(shorter)


def test_data_mixtures_objectives_and_machines():
    result = convert(
        {
            "train_data_paths": ["a", "b"],
            "train_data_weights": [1, 3],
            "valid_data_paths": ["c"],
            "launcher": "slurm",
            "account": "me",
            "num_nodes": 2,
            "hostfile": "hosts",
            "precision": "bfloat16",
            "optimizer_type": "sgd",
            "pipe_partition_method": "type:transformer|mlp",
            "checkpoint_scale": "log",
            "profile": True,
            "train_epochs": 2,
            "train_batch_size": 32,
            "eval_iters": 4,
        }
    )
    sources = result.settings["data.sources"]
    assert [each["weight"] for each in sources.values()] == [0.25, 0.75]
    assert result.choices["launcher"] == "slurm"
    assert result.settings["launcher.slurm_account"] == "me"
    assert result.settings["hardware.nodes"] == 2
    assert result.choices["precision"] == "bf16"
    assert result.choices["zero_stage"] == "1"  # whole states in 16 bits are refused
    assert result.choices["optimizer"] == "sgd"
    assert result.settings["parallelism.pipeline_partition"] == "uniform"
    assert result.settings["logging.profile_steps"] == [10, 12]
    assert result.settings["training.epochs"] == 2
    assert result.settings["training.global_batch_size"] == 32
    assert result.settings["training.evaluation_samples"] == 128
    assert {"valid_data_paths", "hostfile", "checkpoint_scale"} <= {*left(result)}
    dpo = convert({"train_impl": "dpo", "dpo_beta": 0.2, "data_path": "x"})
    assert dpo.choices["objective"] == "dpo" and dpo.choices["data"] == "preferences"
    assert dpo.settings["objective.beta"] == 0.2 and "data.paths" not in dpo.settings
    kto = convert({"train_impl": "kto", "kto_beta": 0.2, "kto_undesirable_weight": 1.5})
    assert kto.choices["objective"] == "kto" and kto.choices["data"] == "answers"
    assert kto.settings["objective.beta"] == 0.2
    assert kto.settings["objective.undesirable_weight"] == 1.5
    assert "train_impl" in left(convert({"train_impl": "reinforce"}))


def test_a_key_may_have_dashes():
    fp16 = {"enabled": True, "loss-scale-window": 5}
    assert convert(LLAMA, fp16=fp16).settings["precision.loss_scale_window"] == 5
