"""Shipped recipes train, with their own settings, when they are shrunk to this machine.

On ranks that are forked, as in `tests/train`: what a launch adds is the same for all of them. The
one for NVMe is launched in `tests/e2e/test_runs.py`, `sft-tiny` in `tests/e2e/test_fine_tuning.py`,
`grpo-tiny` in `test_grpo_page.py`; of two for one objective, the tiny one trains.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from encoders import SETTINGS, SHAPE, encoder
from objective_cases import write_records
from rank_processes import Case, curve, train_cases
from small_chat_model import write_base, write_chat
from whole_recipes import WHOLE

from trainctl.config.catalog import list_recipes
from trainctl.config.compose import compose
from trainctl.hardware import resolve_hardware
from trainctl.options.data import SampleKind
from trainctl.rules.resolve import resolve
from trainctl.runs.layout import RunPaths
from trainctl.train.models.model import skeleton
from trainctl.tuning.input_files import check_model_files, missing_files

SMALL = (
    "model=tiny-llama",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.head_dim=16",
    "model.intermediate_size=128",
    "launcher=local",
    "training.steps=3",
    "training.tokens=null",
    "training.sequence_length=32",
    "training.global_batch_size=4",
    "training.micro_batch_size=1",
    "training.gradient_accumulation_steps=null",
    "training.evaluation_samples=4",
    "schedule.warmup_steps=1",
    "tokenizer=byte",
)
"""Few tokens: without instructions for bf16, a processor is thirty times slower at it."""
FITTED = {
    "8b-fp8": ["hardware=2xcpu", "precision.emulate_fp8=true"],
    "70b-3d": ["hardware=8xcpu", "parallelism.data=null", "model.num_layers=4"],
    "grpo-8b-8x80g": ["hardware=4xcpu", "model.num_key_value_heads=4"],
    "8b-long-context": [
        "hardware=4xcpu",
        "parallelism.sequence=4",
        "training.global_batch_size=4",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=4",
    ],
}
"""Overrides that fit a recipe to the small model and few processes; other recipes train on two."""


NOT_HERE = (
    *("7b-zero3-nvme", "distill-1b-8x80g", "reward-8b-8x80g", "classify-0.6b-1x24g"),
    "grpo-tiny",
)
NAMES = [*(name for name in WHOLE if name not in NOT_HERE), "kto-tiny", "masked-tiny"]


def data_of(name: str, folder: Path) -> list[str]:
    """Return the data overrides of a recipe: text that every machine has, or generated pairs."""
    if name == "distill-tiny":
        model = skeleton(compose([f"recipe={name}", *SMALL]).config.model, torch.float32)
        type(model)(model.config).save_pretrained(folder / "teacher")
        teacher = f"objective.teacher={folder / 'teacher'}"
        return ["data=stdlib", "data.max_bytes=20000", teacher]
    if name.startswith("contrastive"):
        return [f"data.paths=[{write_records(folder, SampleKind.similar)}]"]
    if name == "kto-tiny":
        return [f"data.paths=[{write_records(folder, SampleKind.answers)}]"]
    if name == "masked-tiny":
        encoder(folder / "model", "bert", **SHAPE | SETTINGS["bert"] | {"vocab_size": 264})
        return [f"model.path={folder / 'model'}"]
    if name == "process-reward-tiny":
        steps = folder / "steps.jsonl"
        rows = (
            {"prompt": f"{n}²", "completions": [f"{n}·{n}", f"{n * n}"], "labels": [1, n % 2]}
            for n in range(200)
        )
        steps.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return [f"data.paths=[{steps}]"]
    if name == "classify-tiny":
        texts = folder / "texts.jsonl"
        rows = ({"text": f"{n} is", "label": ["even", "odd"][n % 2]} for n in range(200))
        texts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return [f"data.paths=[{texts}]"]
    if name.startswith("grpo-"):
        prompts = folder / "prompts.jsonl"
        rows = ({"prompt": f"{n}+{n}=", "answer": n + n} for n in range(40))
        prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        sizes = ("samples=2", "max_prompt_tokens=16", "max_answer_tokens=16", "updates=1")
        section = [f"objective.{each}" for each in sizes]
        return [*section, f"data.paths=[{prompts}]", "data.as_message=false"]
    if name not in ("dpo-8b-lora", "reward-tiny"):
        return ["data=stdlib", "data.max_bytes=1000000"]
    pairs = folder / "pairs.jsonl"
    rows = (
        {"prompt": f"{n}² is ", "chosen": f"{n * n}", "rejected": f"{n}"} for n in range(2, 200)
    )
    pairs.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return [f"data.paths=[{pairs}]"]


@pytest.mark.parametrize("name", [info.name for info in list_recipes() if "tiny" in info.name])
def test_tiny_recipes_start_with_data_alone(name: str, tmp_path: Path) -> None:
    """As their first lines say: with a data file, and with a model where it is the user's."""
    if name == "sft-tiny":
        given = [f"data.paths=[{write_chat(tmp_path / 'chat.jsonl', [('1+1', '2')])}]"]
    else:
        given = data_of(name, tmp_path)
    if name in ("sft-tiny", "kto-tiny"):
        write_base(tmp_path / "model", steps=1)
        given.append(f"model.path={tmp_path / 'model'}")
    if name == "grpo-tiny":  # for the model.initial_weights=RUN of its first lines
        given.append("model.weights=random")
    config = compose([f"recipe={name}", *given]).config
    findings = (
        *check_model_files(config),
        *missing_files(config),
        *resolve(config, resolve_hardware(config.hardware)).findings,
    )
    assert not [each for each in findings if each.is_error]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # DeepSpeed compiles what offload needs when it is first used
@pytest.mark.parametrize("name", NAMES)
def test_shrunk_recipes_train(name: str, tmp_path: Path) -> None:
    fitted = FITTED.get(name, ["hardware=2xcpu"])
    # An encoder's shape is that of its directory.
    small = [each for each in SMALL if name != "masked-tiny" or not each.startswith("model")]
    config = compose([f"recipe={name}", *small, *data_of(name, tmp_path), *fitted]).config
    resolution = resolve(config, resolve_hardware(config.hardware))
    assert resolution.plan is not None, resolution.findings
    run = RunPaths(tmp_path / "run")
    train_cases(resolution.plan.mesh.world_size, [Case(resolution.plan, run)])
    assert list(curve(run)) == [1, 2, 3]
