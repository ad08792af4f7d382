"""TRL's GRPOTrainer on answers that are given: `MODEL ROLLOUTS STEPS RATE OPTIONS`.

ROLLOUTS is JSON: for each generation, the prompts, answers and log-probabilities of the tokens, and
the rewards. OPTIONS are further arguments of GRPOConfig, as JSON. Prints the records of its steps.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any


def main(model: str, rollouts: str, steps: int, rate: float, options: dict[str, Any]) -> None:
    """Train, and print the logged records."""
    from datasets import Dataset
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    # Otherwise it deals the answers of a generation to its steps at random.
    grpo_trainer.shuffle_sequence_dict = lambda batch: batch
    vocabulary = {chr(number): number for number in range(256)} | {"<end>": 256}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="\0"))
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    end = "<end>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, pad_token=end)
    given = iter(json.loads(Path(rollouts).read_text()))

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        batch: dict[str, Any] = next(given)
        assert len(batch["prompt_ids"]) == len(prompts)
        return batch

    def reward(given_reward: list[float], **columns: Any) -> list[float]:
        return given_reward

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model),
            reward_funcs=reward,
            rollout_func=rollout,
            args=GRPOConfig(
                output_dir=folder,
                max_steps=steps,
                learning_rate=rate,
                lr_scheduler_type="constant",
                adam_beta2=0.95,
                weight_decay=0.0,
                max_grad_norm=1.0,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                **options,
            ),
            train_dataset=Dataset.from_list([{"prompt": "1+1="}] * 64),
            processing_class=tokenizer,
        )
        trainer.train()
    print("\n" + json.dumps([each for each in trainer.state.log_history if "grad_norm" in each]))


if __name__ == "__main__":
    _, model, rollouts, steps, rate, options = sys.argv
    main(model, rollouts, int(steps), float(rate), json.loads(options))
