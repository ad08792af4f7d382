"""TrainingArguments of transformers: mappings, and the pickle that the Trainer leaves."""

from __future__ import annotations

import io
import pickle
import zipfile
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

from trainctl.config.compose import compose
from trainctl.errors import TrainctlError
from trainctl.hardware import resolve_hardware
from trainctl.migration.configs.import_file import import_file
from trainctl.migration.configs.import_table import import_document
from trainctl.migration.configs.pickled import read_pickled
from trainctl.migration.configs.result import Why
from trainctl.migration.configs.tables import load_table
from trainctl.plans.schedule import Curve
from trainctl.rules.resolve import resolve


def convert(folder=Path(), **document):
    return import_document(load_table("training_arguments"), document, folder=folder)


def left(result, why=Why.left):
    return {each.key: each for each in result.left_out if each.why is why}


def test_every_field_of_transformers_is_in_the_table():
    table = load_table("training_arguments")
    assert [each.name for each in fields(TrainingArguments) if not table.find(each.name)] == []


def test_the_pickle_of_a_trainer(tmp_path):
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=5,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        max_steps=7,
        warmup_steps=2,
        weight_decay=0.01,
        adam_beta2=0.95,
        save_total_limit=2,
        optim="adamw_torch",
        report_to=["tensorboard"],
        hub_token="hf_" + "x" * 30,
        seed=9,
        use_cpu=True,
    )
    file = tmp_path / "training_args.bin"
    torch.save(arguments, file)
    result = import_file(file)
    assert result.tool == "training_arguments" and not left(result, Why.unknown)
    assert {**result.choices, **result.settings} | {
        "optimizer": "adamw",
        "schedule": "cosine",
        "hardware": "cpu",
        "optimizer.lr": 1e-3,
        "optimizer.beta2": 0.95,
        "optimizer.weight_decay": 0.01,
        "optimizer.decay_embeddings": True,
        "schedule.warmup_steps": 2,
        "schedule.floor_ratio": 0.0,
        "training.steps": 7,
        "training.micro_batch_size": 3,
        "training.global_batch_size": 15,
        "training.seed": 9,
        "checkpoint.keep": 2,
        "logging.to": ["tensorboard"],
    } == {**result.choices, **result.settings}
    assert "hf_x" not in str(result)
    assert {each.key for each in result.missing} == {"model.path", "data.paths"}


class Reduced:
    """Object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def write(path, found, *, protocol=2):
    """Write a pickle as torch.save does: an entry of a zip."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("training_args/data.pkl", pickle.dumps(found, protocol=protocol))


@pytest.mark.parametrize("protocol", [2, 4])
def test_pickles_that_call_something_are_refused(tmp_path, protocol):
    import os

    marker = tmp_path / "called"
    shell = Reduced(os.system, f"touch {marker}")
    evil = [
        shell,
        Reduced(eval, f"open({str(marker)!r}, 'w')"),
        {"learning_rate": 1.0, "inner": [(shell,)]},
        Reduced(getattr, os, "system"),
        Reduced(torch.load, "x"),
    ]
    for number, found in enumerate(evil[:3] + evil[4:]):
        file = tmp_path / f"{number}.bin"
        write(file, found, protocol=protocol)
        with pytest.raises(TrainctlError, match="is refused: its pickle names"):
            import_file(file)
    file = tmp_path / "nested.bin"
    text = b"\x80\x04\x8c\x0ctransformers\x8c\x09os.system\x93."  # a name with a dot in it
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", text)
    with pytest.raises(TrainctlError, match="refused"):
        import_file(file)
    assert not marker.exists()


def test_damaged_files_are_named(tmp_path):
    cases = {"empty.bin": b"", "text.bin": b"learning_rate: 1", "zip.bin": None}
    for name, content in cases.items():
        file = tmp_path / name
        if content is None:
            write(file, {"learning_rate": 1.0})  # a mapping, and no arguments
        else:
            file.write_bytes(content)
        with pytest.raises(TrainctlError, match=name):
            import_file(file)
    file = tmp_path / "cut.bin"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps({"a": [1] * 100})[:-20])
    file.write_bytes(buffer.getvalue())
    with pytest.raises(TrainctlError, match="pickle is damaged"):
        import_file(file)
    with pytest.raises(TrainctlError, match="cannot be read"):
        read_pickled(tmp_path / "none.bin")
    laughs: list = ["ha"]
    for _ in range(40):  # 2 ** 40 values in some hundred bytes
        laughs = [laughs, laughs]
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    arguments.laughs = laughs
    torch.save(arguments, tmp_path / "laughs.bin")
    with pytest.raises(TrainctlError, match="more than 100,000 values"):
        import_file(tmp_path / "laughs.bin")


ZERO = {"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({"fsdp": "full_shard auto_wrap", "bf16": True}, ("fsdp2", "3", None)),
        ({"fsdp": ["shard_grad_op", "offload"], "bf16": True}, ("fsdp2", "2", "cpu")),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, ("fsdp2", "2", None)),
        ({"fsdp": "full_shard", "fp16": True}, ("deepspeed", "3", None)),
        ({"fsdp": "full_shard", "optim": "adamw_bnb_8bit"}, ("deepspeed", "3", None)),
        ({"fsdp": ""}, (None, None, None)),
        ({"deepspeed": ZERO}, ("deepspeed", "2", "none")),
    ],
)
def test_sharding(keys, expected):
    choices = convert(**keys).choices
    assert tuple(map(choices.get, ("engine", "zero_stage", "offload"))) == expected


def test_recomputation_kept_checkpoints_and_old_names():
    result = convert(
        gradient_checkpointing=True,
        evaluation_strategy="steps",
        eval_steps=10,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        no_cuda=True,
        per_gpu_train_batch_size=4,
        hub_token="hf_secret",
        group_by_length=True,
        torch_compile=True,
        fsdp_config={"min_num_params": 0},
        adafactor=True,
        half_precision_backend="auto",
        eval_stepz=3,
    )
    assert result.choices["activation_checkpointing"] == "full"
    assert result.choices["hardware"] == "cpu"
    assert result.settings["checkpoint.best_of"] == "loss"
    assert result.settings["training.micro_batch_size"] == 4
    assert result.settings["training.evaluate_every_steps"] == 10
    assert result.settings["kernels.compile"] == "blocks"
    assert {*left(result)} == {"group_by_length", "adafactor"}
    assert {*left(result, Why.default)} == {"save_total_limit"}
    assert left(result, Why.unknown)["eval_stepz"].nearest == "did you mean eval_steps?"
    assert "hf_secret" not in str(result)
    plain = convert(use_cpu=False)
    assert "hardware" not in plain.choices
    assert "optimizer.decay_embeddings" not in plain.settings  # nothing decays
    accuracy = convert(load_best_model_at_end=True, metric_for_best_model="accuracy")
    assert {"load_best_model_at_end", "metric_for_best_model"} <= {*left(accuracy)}


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("constant", {}),
        ("constant_with_warmup", {}),
        ("polynomial", {}),
        ("polynomial", {"power": 2.0, "lr_end": 1e-5}),
        ("inverse_sqrt", {}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("cosine_with_restarts", {"num_cycles": 3}),
        ("warmup_stable_decay", {"num_decay_steps": 20, "decay_type": "linear"}),
        ("warmup_stable_decay", {"num_decay_steps": 90}),
    ],
)
def test_schedules_give_the_rates_of_transformers(kind, arguments):
    from transformers import get_scheduler

    steps, warmup, rate = 100, 10, 1e-3
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = get_scheduler(
        kind, optimizer, warmup, steps, scheduler_specific_kwargs=dict(arguments)
    )
    theirs = []
    for _ in range(steps):
        theirs.append(optimizer.param_groups[0]["lr"] / rate)
        optimizer.step()
        scheduler.step()
    result = convert(
        lr_scheduler_type=kind,
        lr_scheduler_kwargs=arguments,
        learning_rate=rate,
        max_steps=steps,
        warmup_steps=0.0905,  # rounded up to a step
    )
    assert "lr_scheduler_type" in result.carried and not left(result)
    rates = [x for x in result.overrides if x.startswith(("schedule", "training.steps"))]
    config = compose(["recipe=tiny", *rates]).config
    plan = resolve(config, resolve_hardware(config.hardware)).plan
    curve = Curve.of(plan)
    assert [curve.factor(step) for step in range(steps)] == pytest.approx(theirs, abs=1e-12)


def test_schedules_that_are_only_near():
    plateau = convert(lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 2})
    assert plateau.settings["schedule.plateau_patience"] == 3  # torch drops after one more
    flat = convert(lr_scheduler_type="inverse_sqrt")
    assert "lr_scheduler_type" in left(flat)
    epochs = convert(
        lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 2}
    )
    assert "lr_scheduler_type" in left(epochs)
    one = convert(lr_scheduler_type="cosine_with_restarts")
    assert one.choices["schedule"] == "cosine"
    greedy = convert(lr_scheduler_type="greedy", lr_scheduler_kwargs={"window": 3})
    assert {"lr_scheduler_type", "lr_scheduler_kwargs"} <= {*left(greedy)}
