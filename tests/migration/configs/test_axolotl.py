"""Axolotl's keys that only together mean something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainctl import api
from trainctl.cli.main import run
from trainctl.migration.configs.import_table import import_document
from trainctl.migration.configs.result import Why
from trainctl.migration.configs.tables import load_table

BASE = {"base_model": "ORG/NAME", "learning_rate": 1e-4, "sample_packing": True}


def imported(folder=Path(), **keys):
    return import_document(load_table("axolotl"), {**BASE, **keys}, folder=folder)


def left(result, *, why=Why.left):
    return {each.key for each in result.left_out if each.why is why}


FILE = (Path(__file__).parent / "axolotl.yaml").read_text()


def test_a_whole_file_gives_a_recipe_that_validates(tmp_path):
    file = tmp_path / "axolotl.yaml"
    file.write_text(FILE)
    (tmp_path / "chat.jsonl").write_text("{}\n")
    result = api.import_config(file)
    assert result.tool == "axolotl" and result.missing == ()
    assert {
        "model.path=ORG/NAME",
        "adapter=lora",
        "adapter.base_weights=nf4_double",
        "adapter.rank=16",
        "adapter.alpha=32.0",
        "data=chat",
        "data.paths=[chat.jsonl]",
        "data.held_out_fraction=0.1",
        "training.gradient_accumulation_steps=4",
        "training.epochs=2.0",
        "optimizer.lr=0.0002",
        "optimizer.beta2=0.999",
        "schedule=cosine",
        "schedule.floor_ratio=0.1",
        "schedule.warmup_steps=10",
        "activation_checkpointing=full",
        "zero_stage=0",
        "logging.to=[wandb]",
        "logging.wandb.project=chats",
        "checkpoint.every_steps=50",
        "training.evaluate_every_steps=50",
    } <= {override.replace('"', "") for override in result.overrides}
    # Beside frozen weights a plan refuses these two; the recipe goes without them.
    refused = {each.key: each for each in result.left_out if each.why is Why.left}
    assert refused.keys() == {"optimizer", "liger_rms_norm"}
    assert "beside frozen weights" in refused["optimizer"].reason
    assert "override /adapter: " in result.recipe and "Imported from axolotl.yaml" in result.recipe


def test_what_the_command_says(tmp_path, capsys):
    file = tmp_path / "axolotl.yaml"
    file.write_text(f"{FILE}saves_per_epoch: 2\nlora_rr: 3\n")
    assert run(["config", "import", str(file)]) == 0
    shown = capsys.readouterr()
    assert "optimizer.lr=0.0002" in shown.out.splitlines()
    said = " ".join(shown.err.split())
    assert "left out: saves_per_epoch=2: checkpoints are made by steps or minutes" in said
    assert "nearest: checkpoint.every_steps=N" in said and "no effect here: special_tokens" in said
    assert "unknown: lora_rr=3" in said and "did you mean lora_r?" in said
    assert 'left out: optimizer="paged_adamw_8bit"' in said
    assert run(["config", "import", str(file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tool"] == "axolotl" and report["missing"] == []
    assert "lora_r" in report["carried"]
    assert run(["config", "import", str(file), "--from", "axolot"]) == 2
    assert "did you mean axolotl?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "ours", "value"),
    [
        ({"max_steps": 50, "num_epochs": 3}, "training.steps", 50),
        ({"num_epochs": 3}, "training.epochs", 3.0),
        ({}, "training.sequence_length", 512),
        ({"lr_scheduler": "linear"}, "schedule.floor_ratio", 0.0),
        ({}, "schedule.warmup_fraction", 0.03),
        ({"lr_scheduler": "constant"}, "schedule.warmup_fraction", 0.0),
        ({"warmup_ratio": 0.1}, "schedule.warmup_fraction", 0.1),
        ({"lr_scheduler_kwargs": {"min_lr": 1e-5}}, "schedule.floor_ratio", 0.1),
        (
            {"embedding_lr": 2e-4},
            "optimizer.groups",
            [{"match": "embed|wte|lm_head", "lr_factor": 2}],
        ),
        (
            {"lr_groups": [{"name": "o", "modules": ["o_proj"], "lr": 1e-3}]},
            "optimizer.groups",
            [{"match": "o_proj", "lr_factor": 10}],
        ),
        ({"unfrozen_parameters": ["^lm_head"]}, "training.freeze", [r"^(?!.*(?:(?:^lm_head)))"]),
        ({"tiled_mlp": True, "tiled_mlp_num_shards": 4}, "kernels.mlp_tiles", 4),
        ({"cut_cross_entropy": True}, "kernels.cross_entropy", "chunked"),
        ({"torch_compile": True}, "kernels.compile", "blocks"),
        ({"profiler_steps": 3, "profiler_steps_start": 9}, "logging.profile_steps", [10, 12]),
        ({"save_strategy": "no"}, "checkpoint.at_end", False),
        ({"save_strategy": "best"}, "checkpoint.best_of", "loss"),
        ({"optimizer": "muon"}, "optimizer.matrix_lr", None),
        ({"chat_template_jinja": "mine.jinja"}, "data.chat_template", "mine.jinja"),
    ],
)
def test_values(keys, ours, value):
    data = {"datasets": [{"path": "a.jsonl", "type": "chat_template"}]}
    found = imported(**data, **keys).settings[ours]
    assert found == pytest.approx(value) if isinstance(value, float) else found == value


@pytest.mark.parametrize(
    ("keys", "group", "option"),
    [
        ({"bf16": True}, "precision", "bf16"),
        ({"bf16": False, "fp16": True}, "precision", "fp16"),
        ({"bf16": False}, "precision", "fp32"),
        ({"bf16": False, "bfloat16": True}, "precision", "bf16-low-memory"),
        ({"bf16": False, "bfloat16": True, "optimizer": "adamw_8bit"}, "precision", "bf16"),
        ({"bf16": False, "fp16": True}, "zero_stage", "1"),
        ({"fp8": True}, "precision", "fp8"),
        ({"gradient_checkpointing": "offload"}, "activation_checkpointing", "offloaded"),
        (
            {"gradient_checkpointing": True, "selective_checkpointing": True},
            "activation_checkpointing",
            "selective",
        ),
        ({"adapter": "lora", "peft_use_dora": True}, "adapter", "dora"),
        ({"adapter": "lora", "peft_use_rslora": True}, "adapter", "rslora"),
        ({"rl": "dpo", "datasets": [{"path": "a.jsonl"}]}, "data", "preferences"),
        ({"rl": "dpo"}, "objective", "dpo"),
        ({"rl": "simpo"}, "objective", "simpo"),
        ({"lr_scheduler": "constant_with_warmup"}, "schedule", "constant"),
        ({"pretraining_dataset": [{"path": "text.jsonl"}]}, "data", "files"),
    ],
)
def test_options(keys, group, option):
    assert imported(**keys).choices[group] == option


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"adapter": "llama-adapter"}, "adapter"),
        ({"adapter": "lora", "lora_target_modules": "model.*.q_proj"}, "lora_target_modules"),
        (
            {"adapter": "lora", "lora_target_linear": True, "lora_target_parameters": ["a.b"]},
            "lora_target_parameters",
        ),
        ({"adapter": "lora", "lora_modules_to_save": ["norm"]}, "lora_modules_to_save"),
        ({"adapter": "lora", "unfrozen_parameters": ["lm_head"]}, "unfrozen_parameters"),
        ({"unfrozen_parameters": ["embed$[:100]"]}, "unfrozen_parameters"),
        ({"rl": "grpo"}, "rl"),
        ({"rl": "dpo", "dpo_loss_type": ["sigmoid", "hinge"]}, "dpo_loss_type"),
        ({"optimizer": "came_pytorch"}, "optimizer"),
        ({"lr_scheduler": "rex"}, "lr_scheduler"),
        ({"cosine_min_lr_ratio": 0.1, "cosine_constant_lr_ratio": 0.8}, "cosine_constant_lr_ratio"),
        ({"saves_per_epoch": 2}, "saves_per_epoch"),
        ({"val_set_size": 0.1, "evals_per_epoch": 2}, "evals_per_epoch"),
        ({"val_set_size": 500}, "val_set_size"),
        ({"tiled_mlp": True}, "tiled_mlp"),
        ({"plugins": ["mine.Plugin"]}, "plugins"),
        ({"use_comet": True}, "use_comet"),
        ({"chat_template": "llama3"}, "chat_template"),
        ({"deepspeed": "no_such.json"}, "deepspeed"),
        ({"datasets": [{"path": "a.jsonl", "split": "train[:5%]"}]}, "datasets[0].split"),
        ({"datasets": [{"path": "a.jsonl", "type": "alpaca"}]}, "datasets[0].type"),
    ],
)
def test_what_is_left_out_names_the_nearest(keys, what):
    result = imported(**keys)
    found = next(each for each in result.left_out if each.key == what)
    assert found.why is Why.left and found.reason and found.nearest
    assert what not in result.carried


def test_the_strengths_of_preference_losses():
    assert imported(rl="simpo", rl_beta=2.0, simpo_gamma=1.0, cpo_alpha=0).settings[
        "objective.gamma_ratio"
    ] == pytest.approx(0.5)
    assert imported(rl="orpo", orpo_alpha=0.2).settings["objective.weight"] == 0.2
    both = imported(rl="orpo", rl_beta=0.3, orpo_alpha=0.2)
    assert both.settings["objective.weight"] == 0.3 and "orpo_alpha" in both.carried
    assert "cpo_alpha" in imported(rl="simpo", cpo_alpha=0).carried
    entry = {"path": "json", "data_files": "b.jsonl", "type": "chat_template"}
    result = imported(rl="kto", rl_beta=0.2, kto_undesirable_weight=1.5, datasets=[entry])
    assert result.choices["objective"] == "kto" and result.choices["data"] == "answers"
    assert result.settings["objective.beta"] == 0.2
    assert result.settings["objective.undesirable_weight"] == 1.5
    # A sample has both answers, each with its prompt; there each is as long by itself.
    assert result.settings["training.sequence_length"] == 2 * 512
    assert "sequence_len" in left(result, why=Why.default)
    result = imported(rl="dpo", dpo_label_smoothing=0.1, orpo_alpha=0.2)
    assert result.settings["objective.label_smoothing"] == 0.1
    assert "orpo_alpha" in left(result, why=Why.ignored)


def test_reward_models():
    entry = {"path": "json", "data_files": "b.jsonl", "type": "bradley_terry.chat_template"}
    result = imported(reward_model=True, center_rewards_coefficient=0.01, datasets=[entry])
    assert (result.choices["objective"], result.choices["data"]) == ("reward", "preferences")
    assert result.settings["objective.centering"] == 0.01
    entry["type"] = "stepwise_supervised"
    steps = imported(process_reward_model=True, datasets=[entry], sequence_len=2048)
    assert (steps.choices["objective"], steps.choices["data"]) == ("process_reward", "steps")
    assert steps.settings["training.sequence_length"] == 2048  # one answer
    grpo = next(each for each in imported(rl="grpo").left_out if each.key == "rl")
    assert grpo.nearest == "objective=grpo"


def test_the_key_that_says_which_turns_are_learned_is_kept():
    entry = {"path": "json", "data_files": "b.jsonl", "type": "chat_template"}
    result = imported(datasets=[{**entry, "message_field_training": "train"}])
    assert result.settings["data.learn_key"] == "train"
    assert not {key for key in left(result) if "training" in key}


def test_distillation_keeps_the_weights_of_both_losses():
    keys = {"kd_trainer": True, "kd_alpha": 0.9, "kd_ce_alpha": 0.1, "kd_temperature": 2.0}
    result = imported(**keys, kd_beta=1.0, kd_normalize_topk=True)
    assert result.choices["objective"] == "distill"
    assert result.settings["objective.label_weight"] == pytest.approx(0.1 / 3.7, abs=1e-6)
    assert result.settings["objective.temperature"] == 2.0
    assert result.settings["objective.divergence"] == "reverse_kl"
    assert {"kd_normalize_topk", "kd_online_server_model"} <= left(result) | left(
        result, why=Why.default
    )
    none = imported(kd_temperature=2.0)
    assert none.choices["objective"] == "next_token"
    assert "kd_temperature" in left(none, why=Why.ignored)


def test_samples_that_are_not_packed_differ_by_default():
    keys = {"datasets": [{"path": "a.jsonl", "type": "chat_template"}], "sample_packing": None}
    assert "sample_packing" in left(imported(**keys))  # empty is the default
    absent = {name: value for name, value in {**BASE, **keys}.items() if value is not None}
    result = import_document(load_table("axolotl"), absent, folder=Path())
    assert "sample_packing" in left(result, why=Why.default)


def test_datasets_of_the_hub_of_files_and_of_several_kinds(tmp_path):
    (tmp_path / "own").mkdir()
    result = imported(
        tmp_path,
        num_epochs=2,
        datasets=[
            {"path": "org/chats", "type": "chat_template", "data_files": ["a.jsonl"]},
            {"path": "own", "type": "completion", "field": "body"},
            {"path": "json", "data_files": "b.jsonl", "ds_type": "json", "type": "chat_template"},
        ],
    )
    assert result.settings["data.sources"] == {
        "part_1": {
            "kind": "chat",
            "paths": ["hf://datasets/org/chats/a.jsonl"],
            "epochs": 2.0,
            "learn": "assistant",
        },
        "part_2": {"kind": "files", "paths": ["own"], "epochs": 2.0, "text_key": "body"},
        "part_3": {"kind": "chat", "paths": ["b.jsonl"], "epochs": 2.0, "learn": "assistant"},
    }
    assert "training.epochs" not in result.settings and "num_epochs" in left(result)


def test_sharding_by_a_json_and_by_fsdp(tmp_path):
    zero = {"zero_optimization": {"stage": 2, "overlap_comm": True}, "bf16": {"enabled": "auto"}}
    (tmp_path / "zero2.json").write_text(json.dumps({**zero, "train_batch_size": "auto"}))
    result = imported(tmp_path, deepspeed="zero2.json")
    assert result.choices["zero_stage"] == "2" and "deepspeed" in result.carried
    assert result.settings["zero_stage.overlap_comm"] is True
    section = {"offload_params": True, "activation_checkpointing": True, "state_dict_type": "X"}
    result = imported(fsdp_config={**section, "reshard_after_forward": True}, fsdp_version=2)
    assert result.choices["zero_stage"] == "3" and result.choices["offload"] == "cpu-all"
    assert result.choices["activation_checkpointing"] == "full"
    assert (
        imported(fsdp_config={"fsdp_sharding_strategy": "SHARD_GRAD_OP"}).choices["zero_stage"]
        == "2"
    )


def test_names_of_turns_are_carried_over():
    entry = {"path": "a.jsonl", "type": "chat_template", "field_messages": "dialog"}
    mapped = {**entry, "message_property_mappings": {"role": "speaker", "content": "value"}}
    assert imported(datasets=[entry]).settings["data.columns"] == {"messages": "dialog"}
    result = imported(datasets=[mapped])
    assert result.settings["data.columns"] == {"messages": "dialog", "role": "speaker"}
    assert not [each.key for each in result.left_out if "mappings.role" in each.key]
