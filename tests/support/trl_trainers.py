"""TRL's trainers on our texts, in a process of their own: `KIND MODEL FILE STEPS RATE OPTIONS`.

Prints the records of the trainer's steps as JSON. Its tokenizer maps an ASCII text to its bytes. It
pads with an id that ends no text: TRL takes a reward at the last token with another id.

FILE has a record in each line. For `grpo` it is JSON instead: of each generation the prompts, the
answers, the log-probabilities of their tokens, and the rewards. OPTIONS are further arguments of
the trainer's configuration, as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest


def compare_steps(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]], *, first_within: float = 1e-4
) -> None:
    """Compare losses (1e-4, in nats) and gradient norms (1e-3, relative) of all steps."""
    assert len(theirs) == len(ours) > 0
    for number, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        within = 1e-4 if number else first_within
        assert our["loss"] == pytest.approx(their["loss"], abs=within), number
        assert our["grad_norm"] == pytest.approx(their["grad_norm"], rel=1e-3, abs=1e-6), number


def train_with_trl(
    kind: str, model: Path, file: Path, *, steps: int, rate: float, **options: Any
) -> list[dict[str, Any]]:
    """Train in another process, and return the records of the steps."""
    words = [kind, str(model), str(file), str(steps), str(rate), json.dumps(options)]
    done = subprocess.run(
        [sys.executable, __file__, *words], capture_output=True, text=True, cwd=model.parent
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


DEFAULTS = {
    "lr_scheduler_type": "constant",
    "adam_beta2": 0.95,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}


def main(
    kind: str, model: str, file: str, steps: int, rate: float, options: dict[str, Any]
) -> None:
    """Train, and print the logged records."""
    import trl
    from datasets import Dataset
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    vocabulary = {chr(number): number for number in range(256)} | {"<end>": 256, "<pad>": 257}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="\0"))
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    pad = "<pad>" if kind == "reward" else "<end>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token=pad)
    name = {"reward": "Reward"}.get(kind, kind.upper())
    if kind == "reward":
        network = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    else:
        network = AutoModelForCausalLM.from_pretrained(model)
    if kind == "grpo":
        arguments = given_answers(json.loads(Path(file).read_text()))
        rows = [{"prompt": "1+1="}] * 64
    else:
        arguments = {}
        options |= {"per_device_train_batch_size": 8, "max_length": None}
        options |= {"train_sampling_strategy": "sequential"}
        rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        trainer = getattr(trl, f"{name}Trainer")(
            model=network,
            args=getattr(trl, f"{name}Config")(
                output_dir=folder,
                max_steps=steps,
                learning_rate=rate,
                **DEFAULTS | options,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            **arguments,
        )
        trainer.train()
    print("\n" + json.dumps([each for each in trainer.state.log_history if "grad_norm" in each]))


def given_answers(generations: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the arguments of a GRPOTrainer whose answers and rewards are given."""
    from trl.trainer import grpo_trainer

    # Otherwise it deals the answers of a generation to its steps at random.
    grpo_trainer.shuffle_sequence_dict = lambda batch: batch
    given = iter(generations)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        batch: dict[str, Any] = next(given)
        assert len(batch["prompt_ids"]) == len(prompts)
        return batch

    def reward(given_reward: list[float], **columns: Any) -> list[float]:
        return given_reward

    return {"reward_funcs": reward, "rollout_func": rollout}


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), float(sys.argv[5]), json.loads(sys.argv[6]))
