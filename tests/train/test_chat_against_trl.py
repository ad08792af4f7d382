"""Tests of labels and losses on conversations against TRL's trainer on the same batch."""

import json

import numpy as np
import pytest
import torch
from chat_files import asked
from rank_processes import Case, curve, train_cases
from small_chat_model import write_base

from trainctl.config.compose import compose
from trainctl.hardware import resolve_hardware
from trainctl.rules.resolve import resolve
from trainctl.runs.layout import RunPaths

pytestmark = pytest.mark.slow
STEPS = 20
CHATS = [
    asked(("copy 1 for ann", "1"), ("twice 1 for ann", "2")),
    asked(("next 8 for joe", "9"), ("twice 8 for joe", "16")),
    asked(("twice 4 for bob", "8"), ("copy 4 for bob", "4"), ("next 4 for bob", "5")),
    asked(("next 2 for sue", "3"), ("copy 3 for sue", "3")),
    asked(("copy 7 for tom", "7"), ("copy 6 for tom", "6")),
]


def losses_of_trl(base, folder):
    """Train with TRL's SFTTrainer and return its loss at each step."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        model=str(base),
        args=SFTConfig(
            output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=len(CHATS),
            learning_rate=1e-3, lr_scheduler_type="constant", weight_decay=0.0, adam_beta2=0.95,
            adam_epsilon=1e-8, max_grad_norm=1.0, assistant_only_loss=True, use_cpu=True,
            logging_steps=1, save_strategy="no", report_to=[], gradient_checkpointing=False,
            bf16=False, model_init_kwargs={"dtype": "float32"}, disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"messages": chat} for chat in CHATS]),
    )  # fmt: skip
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def plan_of(base, file, length, samples):
    config = compose(
        [
            "recipe=sft-tiny", f"model.path={base}", f"data.paths=[{file}]",
            "data.held_out_fraction=0", "training.evaluation_samples=0", "data.shuffle=false",
            f"training.steps={STEPS}", f"training.sequence_length={length}",
            f"training.global_batch_size={samples}", f"training.micro_batch_size={samples}",
            "schedule=constant", "schedule.warmup_steps=0", "optimizer.lr=1e-3",
            "optimizer.beta1=0.9", "optimizer.beta2=0.95", "optimizer.epsilon=1e-8",
        ]
    ).config  # fmt: skip
    resolution = resolve(config, resolve_hardware(config.hardware))
    assert resolution.plan is not None, resolution.findings
    return resolution.plan


def test_losses_are_trls_packed_and_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))
    base = tmp_path / "base"
    write_base(base, steps=1)
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    torch.manual_seed(0)
    theirs = losses_of_trl(base, tmp_path / "trl")
    # All of them in two samples; then each in one, as no two have room there.
    cases = {}
    for name, length, samples in (("packed", 120, 2), ("alone", 60, 5)):
        cases[name] = Case(plan_of(base, file, length, samples), RunPaths(tmp_path / name))
    train_cases(1, [*cases.values()], together=True)
    packed, alone = (
        np.array([loss for loss, _ in curve(case.run).values()]) for case in cases.values()
    )
    assert len(packed) == len(alone) == len(theirs) == STEPS
    np.testing.assert_allclose(packed, alone, rtol=0, atol=1e-5)
    assert abs(packed[0] - theirs[0]) < 1e-5
    np.testing.assert_allclose(packed, theirs, rtol=0, atol=1e-4)
