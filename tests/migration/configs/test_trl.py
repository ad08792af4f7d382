"""TRL's configurations: model, adapter, data sets of the hub, objectives of pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainctl.migration.configs.import_file import import_file
from trainctl.migration.configs.import_table import import_document
from trainctl.migration.configs.result import Why
from trainctl.migration.configs.tables import detect, load_table

HUB = "hf://datasets/a/b@refs/convert/parquet"


def convert(**document):
    return import_document(load_table("trl"), document, folder=Path())


def left(result, why=Why.left):
    return {each.key: each for each in result.left_out if each.why is why}


@pytest.mark.slow
def test_every_field_of_trl_is_in_the_table():
    """Slow: it imports TRL."""
    from dataclasses import fields

    from trl import (
        DPOConfig,
        GRPOConfig,
        KTOConfig,
        ModelConfig,
        RewardConfig,
        RLOOConfig,
        ScriptArguments,
        SFTConfig,
    )

    table = load_table("trl")
    classes = (SFTConfig, DPOConfig, KTOConfig, RewardConfig, ModelConfig, ScriptArguments)
    classes = (*classes, GRPOConfig, RLOOConfig)
    names = {each.name for each_class in classes for each in fields(each_class)}
    assert sorted(name for name in names if not table.find(name)) == []


def test_detection_beside_the_tables_that_share_keys():
    for keys, tool in (
        (("model_name_or_path", "learning_rate", "dataset_name"), "trl"),
        (("output_dir", "learning_rate", "dataset_num_proc", "max_length"), "trl"),
        (("output_dir", "learning_rate", "num_train_epochs"), "training_arguments"),
    ):
        assert detect(dict.fromkeys(keys), {*keys}, file="f") == tool


def test_supervised_fine_tuning_with_an_adapter():
    result = convert(
        model_name_or_path="org/model",
        torch_dtype="bfloat16",
        attn_implementation="kernels/flash",
        use_peft=True,
        lora_r=8,
        lora_alpha=16,
        lora_target_modules=["q_proj"],
        lora_target_parameters=["experts.down_proj"],
        lora_modules_to_save=["lm_head"],
        load_in_4bit=True,
        use_bnb_nested_quant=True,
        use_rslora=True,
        dataset_name="a/b",
        dataset_config="c",
        dataset_test_split="valid",
        eval_strategy="steps",
        packing=True,
        packing_strategy="wrapped",
        max_seq_length=2048,
        assistant_only_loss=True,
        chat_template="{{ messages }}",
        learning_rate=1e-4,
        gradient_checkpointing=True,
        wandb_project="p",
        report_to=["wandb"],
    )
    assert result.choices == {
        "model": "hf",
        "tokenizer": "hf",
        "objective": "next_token",
        "precision": "bf16",
        "activation_checkpointing": "full",
        "adapter": "rslora",
        "data": "chat",
        "schedule": "linear",
        "optimizer": "adamw",
    }
    expected = {
        "model.path": "org/model",
        "adapter.rank": 8,
        "adapter.dropout": 0.05,
        "adapter.targets": ["q_proj", "experts.down_proj"],
        "adapter.also_train": ["head"],
        "adapter.base_weights": "nf4_double",
        "data.paths": [f"{HUB}/c/train/*.parquet"],
        "data.held_out_paths": [f"{HUB}/c/valid/*.parquet"],
        "data.packing": "stream",
        "data.learn": "assistant",
        "training.sequence_length": 2048,
        "logging.wandb.project": "p",
    }
    assert {key: result.settings.get(key) for key in expected} == expected
    assert {*left(result)} == {"attn_implementation", "chat_template"}


def test_objectives():
    dpo = convert(beta=0.2, loss_type=["ipo"], dataset_name="a/b")
    assert dpo.choices["objective"] == "dpo" and dpo.choices["data"] == "preferences"
    assert dpo.settings["training.sequence_length"] == 2 * 1024
    assert dpo.settings["objective.loss"] == "ipo" and dpo.settings["objective.beta"] == 0.2
    other = convert(beta=0.2, loss_type="apo_zero", label_smoothing=0.1)
    assert "loss_type" in left(other)
    assert other.settings["objective.label_smoothing"] == 0.1
    simpo = convert(beta=2.0, loss_type="simpo", simpo_gamma=1.0)
    assert simpo.choices["objective"] == "simpo"
    assert simpo.settings["objective.gamma_ratio"] == 0.5
    for keys in ({"class": "trl.KTOConfig"}, {"loss_type": "kto"}):
        kto = convert(**keys, beta=0.2, undesirable_weight=1.5)
        assert kto.choices["objective"] == "kto" and kto.choices["data"] == "answers"
        assert kto.settings["objective.beta"] == 0.2
        assert kto.settings["objective.undesirable_weight"] == 1.5
    assert "loss_type" in left(convert(**{"class": "KTOConfig", "loss_type": "apo_zero_unpaired"}))
    orpo = convert(**{"class": "trl.experimental.orpo.ORPOConfig", "beta": 0.3})
    assert orpo.choices["objective"] == "orpo" and orpo.settings["objective.weight"] == 0.3
    keys = {"teacher_model_name_or_path": "/models/large", "lmbda": 0, "seq_kd": False}
    for beta, kind in ((0.0, "forward_kl"), (1.0, "reverse_kl"), (0.3, "jsd"), (None, "jsd")):
        distill = convert(**keys, beta=beta)
        assert distill.choices["objective"] == "distill" and "lmbda" not in left(distill)
        assert distill.settings["objective.teacher"] == "/models/large"
        assert distill.settings["objective.divergence"] == kind
    assert distill.settings["objective.beta"] == 0.5
    distill = convert(teacher_model_name_or_path="org/large", lmbda=0.5)
    assert {"teacher_model_name_or_path", "lmbda"} <= {*left(distill)}
    reward = convert(center_rewards_coefficient=0.01, dataset_name="a/b")
    assert (reward.choices["objective"], reward.choices["data"]) == ("reward", "preferences")
    assert reward.settings["objective.centering"] == 0.01
    assert "beta" in left(convert(center_rewards_coefficient=0.01, beta=0.1))
    chat = convert(dataset_name="a/b", temperature=0.9)
    assert "temperature" in left(chat, Why.ignored)


def test_grpo_and_rloo():
    given = {
        "reward_funcs": ["accuracy_reward", "my_lib.rewards.polite"],
        "reward_weights": [1.0, 0.5],
        "num_generations": 16,
        "max_completion_length": 2048,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 8,
        "loss_type": "dr_grpo",
        "scale_rewards": False,
        "beta": 0.04,
        "use_peft": True,
    }
    result = convert(**given)
    assert (result.choices["objective"], result.choices["data"]) == ("grpo", "prompts")
    objective = {k.removeprefix("objective."): v for k, v in result.settings.items()}
    assert objective["rewards"] == {
        "accuracy_reward": {"kind": "exact_answer", "column": "solution", "weight": 1.0},
        "polite": {"kind": "function", "call": "my_lib.rewards:polite", "weight": 0.5},
    }
    assert left(result)["reward_funcs"].value == "my_lib.rewards.polite"
    assert objective["samples"] == 16 and objective["updates"] == 2
    assert objective["advantage"] == "centered" and objective["normalize_by"] == "length"
    assert objective["clip_low"] == objective["clip_high"] == 0.2
    assert objective["kl_weight"] == 0.04 and objective["rollout"] == "engine"
    assert result.settings["training.sequence_length"] == 512 + 2048
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_port": 9000}
    others = convert(**given | server | {"epsilon_high": 0.28, "scale_rewards": "batch"})
    assert others.settings["objective.rollout_url"] == "http://localhost:9000"
    assert others.settings["objective.clip_high"] == 0.28
    assert "scale_rewards" in left(others)
    rloo = convert(**{"class": "trl.RLOOConfig", "max_completion_length": 64})
    assert rloo.settings["objective.advantage"] == "leave_one_out"
    assert rloo.settings["objective.samples"] == 2


def test_grpo_validates(tmp_path):
    given = {
        "model_name_or_path": "org/m",
        "dataset_name": "a/b",
        "reward_funcs": ["accuracy_reward"],
        "num_train_epochs": 2,
        "beta": 0.04,
    }
    file = tmp_path / "grpo.yaml"
    for alone in ({}, {"use_peft": True, "lora_modules_to_save": ["lm_head"]}):
        file.write_text(json.dumps(given | alone))
        found = import_file(file)
        assert "beta" in left(found) and "num_train_epochs" not in left(found)
        assert found.settings["training.epochs"] == 2 and found.missing == ()
    file.write_text(json.dumps(given | {"use_peft": True}))
    found = import_file(file)
    assert found.settings["objective.kl_weight"] == 0.04 and found.missing == ()


def test_mixtures():
    two = {"datasets": [{"id": "a/b", "split": "x"}, {"id": "c/d", "config": "e"}]}
    whole = convert(dataset_mixture=two, num_train_epochs=2)
    assert whole.settings["data.paths"] == [
        f"{HUB}/default/x/*.parquet",
        "hf://datasets/c/d@refs/convert/parquet/e/train/*.parquet",
    ]
    assert whole.settings["training.epochs"] == 2
    two["datasets"][0]["weight"] = 0.5
    two["test_split_size"] = 0.1
    mixed = convert(dataset_mixture=two, num_train_epochs=2)
    assert [each["epochs"] for each in mixed.settings["data.sources"].values()] == [1.0, 2.0]
    assert mixed.settings["data.held_out_fraction"] == 0.1
    assert "training.epochs" not in mixed.settings and "num_train_epochs" in left(mixed)
    shares = convert(dataset_mixer={"a/b": 1.0}, dataset_splits=["x", "y"], eval_strategy="epoch")
    assert shares.settings["data.held_out_paths"] == [f"{HUB}/default/y/*.parquet"]
    assert {"eval_strategy"} <= {*left(shares)}


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({}, "bf16"),
        ({"bf16": False}, "fp32"),
        ({"bf16": False, "dtype": "bfloat16"}, "bf16-low-memory"),
        ({"fp16": True}, "fp16"),
    ],
)
def test_formats(keys, expected):
    assert convert(**keys).choices["precision"] == expected
    told = convert(dtype="bfloat16", bf16=True)
    assert left(told)["dtype"].nearest == "precision=bf16-low-memory"


def test_what_is_not_packed_is_said():
    told = convert(packing=False, packing_strategy="bfd", dataset_name="a/b")
    assert "more conversations" in left(told)["packing"].reason
    assert {*left(convert(), Why.default)} >= {"packing"}
    pairs = convert(packing=False, beta=0.1)
    assert "packing" in left(pairs, Why.ignored) and "data.packing" not in pairs.settings


def test_templates_and_offloading():
    result = convert(
        chat_template_path="t.jinja", activation_offloading=True, completion_only_loss=True
    )
    assert result.settings["data.chat_template"] == "t.jinja"
    assert result.choices["activation_checkpointing"] == "offloaded"
    assert result.settings["data.learn"] == "assistant"
    assert "chat_template_path" in left(convert(chat_template_path="org/model"))
