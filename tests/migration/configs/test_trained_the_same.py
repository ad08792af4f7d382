"""What an import trains: the data of its program, and, beside the installed ones, their steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from imported_steps import Foreign, train
from rank_processes import Case, tiny_config, tiny_plan, train_cases
from trl_trainers import train_with_trl

from trainctl.config.compose import compose
from trainctl.migration.configs.import_file import import_file
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.models.model import skeleton


def imported(folder: Path, tool: str, **document):
    file = folder / "source.yaml"
    file.write_text(json.dumps(document))
    return import_file(file, tool=tool)


def left(result):
    return {each.key: each for each in result.left_out}


def missing(result):
    return {each.key: each for each in result.missing}


TRL = {"learning_rate": 1e-4, "max_steps": 4, "model_name_or_path": "a/b"}


@pytest.mark.parametrize(
    ("tool", "document"),
    [
        ("trl", TRL | {"dataset_name": "a/b"}),
        ("training_arguments", {"learning_rate": 1e-4, "max_steps": 4}),
        ("openrlhf", {"openrlhf": "train_sft", "data": {"dataset": "a/b"}, "eval": {"steps": 5}}),
        ("axolotl", {"base_model": "a/b", "datasets": [{"path": "a.jsonl", "type": "alpaca"}]}),
        ("llama_factory", {"stage": "sft", "dataset": "a"}),
        ("llama_factory_v1", {"train_dataset": "a.jsonl"}),
    ],
)
def test_nothing_is_held_out_where_the_source_does_not_evaluate(tmp_path, tool, document):
    found = imported(tmp_path, tool, **document)
    assert found.settings["data.held_out_fraction"] == 0.0
    assert "data.held_out_paths" not in missing(found)


def test_what_is_held_out_by_the_source_is_held_out_here(tmp_path):
    found = imported(tmp_path, "llama_factory", stage="sft", dataset="a", val_size=0.1)
    assert found.settings["data.held_out_fraction"] == 0.1
    accelerate = imported(tmp_path, "accelerate", distributed_type="NO")
    assert "data.held_out_fraction" not in accelerate.settings  # the script says it


@pytest.mark.parametrize(
    ("tool", "document", "key"),
    [
        ("trl", TRL | {"dataset_name": "a.jsonl", "eval_strategy": "steps"}, "dataset_test_split"),
        (
            "axolotl",
            {
                "base_model": "a/b",
                "datasets": [{"path": "a.jsonl", "type": "alpaca"}],
                "test_datasets": [{"path": "a.jsonl", "type": "alpaca", "split": "test"}],
                "eval_steps": 5,
            },
            "test_datasets",
        ),
        (
            "openrlhf",
            {
                "openrlhf": "train_sft",
                "data": {"dataset": "./a"},
                "eval": {"dataset": "./a", "steps": 5},
            },
            "eval.dataset",
        ),
    ],
)
def test_data_that_is_trained_on_is_not_held_out(tmp_path, tool, document, key):
    found = imported(tmp_path, tool, **document)
    assert "data.held_out_paths" not in found.settings
    assert "these are trained on" in left(found)[key].reason
    assert "data.held_out_fraction=0.05" in missing(found)["data.held_out_paths"].hint


def test_splits_of_a_folder_are_its_files(tmp_path):
    for name in ("train-0.jsonl", "train-1.jsonl", "test/0.jsonl", "readme.md"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text("")
    document = TRL | {"dataset_name": "data", "eval_strategy": "steps"}
    found = imported(tmp_path, "trl", **document)
    assert found.settings["data.paths"] == ["data/train-0.jsonl", "data/train-1.jsonl"]
    assert found.settings["data.held_out_paths"] == ["data/test/0.jsonl"]


@pytest.mark.parametrize(
    ("tool", "key", "document"),
    [
        ("trl", "deepspeed", TRL),
        ("training_arguments", "deepspeed", {"learning_rate": 1e-4, "max_steps": 4}),
        ("axolotl", "deepspeed", {"base_model": "a/b"}),
        ("llama_factory", "deepspeed", {"stage": "sft"}),
        ("accelerate", "deepspeed_config_file", {"distributed_type": "DEEPSPEED"}),
    ],
)
def test_a_stage_that_cannot_be_read_is_missing(tmp_path, tool, key, document):
    for name, content in (("none.json", None), ("cut.json", '{"zero_'), ("wrong.json", "[1]")):
        if content is not None:
            (tmp_path / name).write_text(content)
        section = {"deepspeed_config": {key: name}} if tool == "accelerate" else {key: name}
        found = imported(tmp_path, tool, **document | section)
        assert "zero_stage" not in found.choices
        assert "no readable JSON" in missing(found)["zero_stage"].message


@pytest.mark.parametrize(
    ("tool", "document", "key"),
    [
        ("trl", TRL | {"use_peft": True, "lora_target_modules": []}, "lora_target_modules"),
        ("axolotl", {"base_model": "a/b", "adapter": "lora"}, "lora_target_modules"),
        ("llama_factory", {"stage": "sft", "finetuning_type": "lora"}, "lora_target"),
        (
            "openrlhf",
            {"openrlhf": "train_sft", "ds.lora.rank": 8},
            "ds.lora.target_modules",
        ),
        (
            "llama_factory_v1",
            {"train_dataset": "a.jsonl", "peft_config.name": "lora"},
            "peft_config.target_modules",
        ),
    ],
)
def test_adapters_outside_of_the_blocks_are_left_out(tmp_path, tool, document, key):
    found = imported(tmp_path, tool, **document | {key: ["q_proj", "lm_head", "embed_tokens"]})
    assert found.settings["adapter.targets"] == ["q_proj"]
    assert "adapter.also_train=[embeddings,head]" in left(found)[key].nearest
    alone = imported(tmp_path, tool, **document | {key: ["lm_head"]})
    assert alone.settings["adapter.targets"] == ["lm_head"]  # a plan refuses it


def test_absolute_files_of_a_dataset_stay(tmp_path):
    (tmp_path / "data").mkdir()
    info = {"a": {"file_name": str(tmp_path / "a.jsonl")}, "b": {"file_name": "b.jsonl"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    document = {"stage": "sft", "dataset": "a,b", "dataset_dir": str(tmp_path / "data")}
    found = imported(tmp_path, "llama_factory", **document)
    assert found.settings["data.paths"] == [
        str(tmp_path / "a.jsonl"),
        str(tmp_path / "data" / "b.jsonl"),
    ]
    files = [{"path": "some", "data_files": [str(tmp_path / "c.jsonl")], "type": "alpaca"}]
    axolotl = imported(tmp_path, "axolotl", base_model="a/b", datasets=files)
    assert axolotl.settings["data.paths"] == [str(tmp_path / "c.jsonl")]


@pytest.mark.parametrize("size", [0, -1, 1])
def test_a_size_that_switches_an_axis_off_is_one(tmp_path, size):
    neox = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "train_iters": 4}
    found = imported(
        tmp_path, "gpt_neox", **neox, model_parallel_size=size, pipe_parallel_size=size
    )
    assert found.settings["parallelism.tensor"] == found.settings["parallelism.pipeline"] == 1
    parts = {"parallelism_config_tp_size": size, "parallelism_config_cp_size": size}
    found = imported(tmp_path, "accelerate", distributed_type="NO", parallelism_config=parts)
    assert found.settings["parallelism.tensor"] == found.settings["parallelism.context"] == 1


HERE = ("model", "tokenizer", "data")
"""Sections that the tests give; the others are the import's."""
LENGTH = 64


def case_of(folder, found, like, *more):
    """Return the case of an import, with weights, tokenizer and data of another configuration."""
    overrides = [x for x in found.overrides if not x.startswith(("logging.to", *HERE))]
    config = compose([*overrides, f"training.sequence_length={LENGTH}", *more]).config
    like.model.initial_weights = str(folder / "model")
    torch.manual_seed(1)
    model = skeleton(like.model, torch.float32)
    type(model)(model.config).save_pretrained(folder / "model")
    for name in HERE:
        setattr(config, name, getattr(like, name))
    return Case(tiny_plan(config, 1), RunPaths(folder / "run"))


def assert_same_steps(case, theirs):
    """Train here, and compare rates exactly and losses to the last digits of fp32."""
    train_cases(1, [case])
    ours = [each for each in read_events(case.run.events) if each["event"] == "step"]
    assert len(ours) == len(theirs) == 3
    for our, (loss, rate) in zip(ours, theirs, strict=True):
        assert our["learning_rate"] == pytest.approx(rate, rel=1e-9, abs=1e-15)
        assert our["loss"] == pytest.approx(loss, abs=5e-6)


SCHEDULES = {
    "linear": {},
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 1},
    "polynomial": {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}},
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_three_steps_are_those_of_the_trainer(tmp_path, schedule):
    """Slow: the Trainer trains the same samples."""
    arguments = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "max_steps": 3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.7,
        "use_cpu": True,
        **schedule,
    }
    found = imported(tmp_path, "training_arguments", **arguments)
    case = case_of(tmp_path, found, tiny_config())
    own = {"logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    assert_same_steps(case, train(Foreign(case, arguments | own)))


@pytest.mark.slow
def test_three_steps_are_those_of_accelerate(tmp_path):
    """Slow: a script with an Accelerator trains the same samples; optimizer and rates are its."""
    section = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.7, "zero_stage": 0}
    document = {"distributed_type": "DEEPSPEED", "deepspeed_config": section}
    found = imported(tmp_path, "accelerate", **document)
    script = "training.steps=3 training.micro_batch_size=2 optimizer.lr=1e-3 schedule=linear"
    script += " schedule.warmup_fraction=0 schedule.floor_after_end=true optimizer.weight_decay=0"
    case = case_of(tmp_path, found, tiny_config(), *script.split())
    assert_same_steps(case, train(Foreign(case, document)))


@pytest.mark.slow
def test_three_steps_are_those_of_trl(tmp_path):
    """Slow: TRL's DPO trains the same pairs."""
    pairs = tmp_path / "pairs.jsonl"
    rows = ({"prompt": f"{a}+7=", "chosen": f"{a + 7}", "rejected": f"{a}"} for a in range(24))
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "beta": 0.3,
        "lr_scheduler_type": "linear",
        "warmup_steps": 1,
        "adam_beta2": 0.99,
        "weight_decay": 0.1,
        "max_grad_norm": 0.7,
        "precompute_ref_log_probs": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    given = {"per_device_train_batch_size": 8, "learning_rate": 1e-3, "max_steps": 3}
    found = imported(tmp_path, "trl", **given, **options)
    like = tiny_config(
        objective__kind="dpo",
        data__kind="preferences",
        data__paths=[str(pairs)],
        data__shuffle=False,
        data__held_out_fraction=0.0,
        data__on_too_long="drop",
        data__max_bytes=None,
        data__packing="best_fit",
        data__mask_documents=True,
    )
    case = case_of(tmp_path, found, like)
    theirs = train_with_trl("dpo", tmp_path / "model", pairs, steps=3, rate=1e-3, **options)
    assert_same_steps(case, [(each["loss"], each["learning_rate"]) for each in theirs])
