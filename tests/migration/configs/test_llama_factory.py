"""LLaMA-Factory's keys that only together mean something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainctl import api
from trainctl.migration.configs.import_table import import_document
from trainctl.migration.configs.result import Why
from trainctl.migration.configs.tables import load_table

BASE = {"model_name_or_path": "ORG/NAME"}


def imported(folder=Path(), **keys):
    return import_document(load_table("llama_factory"), {**BASE, **keys}, folder=folder)


def imported_v1(**keys):
    return import_document(load_table("llama_factory_v1"), {"model": "O/N", **keys}, folder=Path())


FILE = """
model_name_or_path: ORG/NAME
stage: sft
finetuning_type: lora
lora_rank: 16
lora_target: q_proj, v_proj
dataset: own, public
template: llama3
cutoff_len: 1024
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
save_steps: 500
"""


def test_a_whole_file_gives_a_recipe_that_validates(tmp_path):
    (tmp_path / "data").mkdir()
    info = {"own": {"file_name": "own.jsonl"}, "public": {"hf_hub_url": "org/public"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    file = tmp_path / "theirs.yaml"
    file.write_text(FILE)
    result = api.import_config(file)
    assert result.tool == "llama_factory" and result.missing == ()
    assert result.settings["data.paths"] == ["data/own.jsonl", "hf://datasets/org/public"]
    assert result.settings["adapter.targets"] == ["q_proj", "v_proj"]
    assert result.settings["adapter.alpha"] == 32.0  # twice the rank
    assert result.settings["optimizer.weight_decay"] == 0.0
    assert result.settings["schedule.floor_ratio"] == 0.0
    assert result.choices["activation_checkpointing"] == "full"  # there it is on
    assert result.choices["precision"] == "bf16" and result.choices["zero_stage"] == "0"
    assert {each.key: each.why for each in result.left_out} == {
        "template": Why.left,
        "packing": Why.default,
        "save_total_limit": Why.default,
    }


def test_columns_of_a_dataset_are_carried_over(tmp_path):
    (tmp_path / "data").mkdir()
    alpaca = {"file_name": "a.json", "columns": {"prompt": "q", "query": "more", "system": "s"}}
    shared = {"file_name": "b.json", "formatting": "sharegpt", "columns": {"messages": "turns"}}
    shared["tags"] = {"role_tag": "who", "content_tag": "value", "user_tag": "human"}
    pairs = {"file_name": "c.json", "ranking": True, "columns": {"chosen": "best"}}
    answers = {"file_name": "d.json", "columns": {"kto_tag": "good", "images": "pictures"}}
    info = {"alpaca": alpaca, "shared": shared, "pairs": pairs, "answers": answers}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))

    def found(dataset: str, **keys: str):
        file = tmp_path / "theirs.yaml"
        file.write_text(json.dumps({"model_name_or_path": "m", "dataset": dataset, **keys}))
        return api.import_config(file, tool="llama_factory")

    columns = {"instruction": "q", "input": "more", "system": "s"}
    assert found("alpaca").settings["data.columns"] == columns
    assert found("shared").settings["data.columns"] == {"conversations": "turns", "from": "who"}
    both = found("alpaca,shared").settings["data.sources"]
    assert both["part_1"]["columns"] == columns and both["part_2"]["paths"] == ["data/b.json"]
    pair = found("pairs", stage="dpo").settings["data.columns"]
    assert pair == {"prompt": "instruction", "chosen": "best"}
    kto = found("answers", stage="kto")
    named = {"prompt": "instruction", "completion": "output", "label": "good"}
    assert kto.settings["data.columns"] == named
    assert any("images of dataset_info" in each.reason for each in kto.left_out)


@pytest.mark.parametrize(
    ("keys", "ours", "value"),
    [
        ({"quantization_bit": 4}, "adapter.base_weights", "nf4_double"),
        ({"quantization_bit": 4, "double_quantization": False}, "adapter.base_weights", "nf4"),
        ({"quantization_bit": 8}, "adapter.base_weights", "int8"),
        (
            {"additional_target": "embed_tokens,lm_head"},
            "adapter.also_train",
            ["embeddings", "head"],
        ),
        ({"stage": "dpo", "pref_loss": "orpo", "pref_beta": 0.2}, "objective.weight", 0.2),
        ({"stage": "dpo", "pref_loss": "simpo"}, "objective.gamma_ratio", 5.0),
        ({"stage": "kto", "kto_rejected_weight": 1.5}, "objective.undesirable_weight", 1.5),
        ({"stage": "kto", "pref_beta": 0.2}, "objective.beta", 0.2),
        ({"stage": "dpo", "pref_loss": "hinge"}, "objective.loss", "hinge"),
        ({"mask_history": True}, "data.learn", "last"),
        ({"train_on_prompt": True}, "data.learn", "all"),
        ({"enable_thinking": False}, "data.template_arguments", {"enable_thinking": False}),
        ({"packing": True}, "data.mask_documents", False),
        ({"packing": True, "neat_packing": True}, "data.mask_documents", True),
        ({"val_size": 0.1}, "data.held_out_fraction", 0.1),
        ({"finetuning_type": "freeze"}, "training.freeze", None),
        ({"sequence_parallel": True}, "parallelism.sequence_sharded_norms", True),
    ],
)
def test_values(keys, ours, value):
    found = imported(**keys).settings[ours]
    if ours == "training.freeze":
        assert found[:2] == ["all_but_last_blocks:2", "head"]
    else:
        assert found == value


@pytest.mark.parametrize(
    ("keys", "group", "option"),
    [
        ({"use_dora": True}, "adapter", "dora"),
        ({"use_rslora": True}, "adapter", "rslora"),
        ({"finetuning_type": "full"}, "adapter", "none"),
        ({"stage": "pt"}, "data", "files"),
        ({"stage": "dpo"}, "data", "preferences"),
        ({"stage": "rm"}, "objective", "reward"),
        ({"stage": "rm"}, "data", "preferences"),
        ({"stage": "dpo", "pref_loss": "simpo"}, "objective", "simpo"),
        ({"pure_bf16": True}, "precision", "bf16-low-memory"),
        ({"finetuning_type": "full", "fp16": True}, "precision", "fp16"),
        ({"finetuning_type": "full", "fp16": True}, "zero_stage", "1"),
        ({"fp8": True}, "precision", "fp8"),
        ({"use_muon": True, "optim": "adamw_torch"}, "optimizer", "muon"),
        ({}, "activation_checkpointing", "full"),
        ({"disable_gradient_checkpointing": True}, "activation_checkpointing", "none"),
        ({"recompute_granularity": "selective"}, "activation_checkpointing", "selective"),
    ],
)
def test_options(keys, group, option):
    assert imported(**keys).choices[group] == option


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"finetuning_type": "oft"}, "finetuning_type"),
        ({"quantization_bit": 4, "quantization_method": "hqq"}, "quantization_method"),
        ({"quantization_bit": 3}, "quantization_bit"),
        ({"use_dora": True, "use_rslora": True}, "use_rslora"),
        ({"finetuning_type": "freeze", "freeze_trainable_layers": -2}, "freeze_trainable_layers"),
        ({"stage": "ppo"}, "stage"),
        ({"stage": "dpo", "pref_loss": "kto_pair"}, "pref_loss"),
        ({"dataset": "nowhere"}, "dataset"),
        ({"val_size": 500}, "val_size"),
        ({"fp16": True}, "fp16"),
        ({"optim": "adafactor"}, "optim"),
        ({"deepspeed": "no_such.json"}, "deepspeed"),
    ],
)
def test_what_is_left_out_names_the_nearest(keys, what):
    found = next(each for each in imported(**keys).left_out if each.key == what)
    assert found.why is Why.left and found.reason and found.nearest


def test_version_1():
    result = imported_v1(train_dataset="data/x.yaml", dist_config={"name": "fsdp2"})
    assert result.choices["zero_stage"] == "3" and result.choices["schedule"] == "constant"
    assert result.settings["optimizer.groups"] == [{"match": ".", "weight_decay": 0.01}]
    assert result.settings["training.gradient_accumulation_steps"] == 1
    result = imported_v1(
        peft_config={"name": "lora", "r": 4, "target_modules": "all"},
        quant_config={"name": "bnb", "quantization_bit": 4},
        optim_config={"name": "muon", "adamw_betas": [0.8, 0.9]},
        kernel_config={"name": "auto, liger_kernel"},
        global_batch_size=8,
        batching_strategy="padding_free",
    )
    assert result.choices["adapter"] == "lora" and result.choices["optimizer"] == "muon"
    assert result.settings["adapter.base_weights"] == "nf4_double"
    assert result.settings["optimizer.beta1"] == 0.8 and result.settings["kernels.liger"] is True
    assert result.settings["training.global_batch_size"] == 8
    frozen = imported_v1(peft_config={"name": "freeze", "freeze_trainable_layers": 3})
    assert frozen.settings["training.freeze"][0] == "all_but_last_blocks:3"


def test_data_of_version_1(tmp_path):
    pairs = "pairs: {path: org/pairs, converter: pair, size: 9}"
    (tmp_path / "data.yaml").write_text(f"own: {{path: data/own.jsonl}}\n{pairs}\n")
    keys = {"model": "O/N", "train_dataset": "data.yaml", "eval_dataset": "held.jsonl"}
    result = import_document(load_table("llama_factory_v1"), keys, folder=tmp_path)
    assert result.choices["data"] == "preferences" and result.choices["objective"] == "dpo"
    assert result.settings["data.paths"] == ["data/own.jsonl", "hf://datasets/org/pairs"]
    assert result.settings["data.held_out_paths"] == ["held.jsonl"]
    reasons = {each.key: each.reason for each in result.left_out}
    assert "no size of a dataset" in reasons["train_dataset"]
    absent = imported_v1(train_dataset="no_such.yaml")
    assert "not here" in next(x.reason for x in absent.left_out if x.key == "train_dataset")


def test_secrets_are_not_shown():
    result = imported(hf_hub_token="hf_abc", ms_hub_token="ms_abc", dataset="https://me:pw@host/a")
    assert not any(secret in repr(result) for secret in ("hf_abc", "ms_abc", "pw@"))
