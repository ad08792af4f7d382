"""TRL's RewardTrainer on pairs of texts, in a process of its own: `MODEL PAIRS STEPS RATE`.

Prints the records of its steps as JSON. Its tokenizer maps an ASCII text to its bytes, and pads
with an id that ends no text: TRL takes the reward at the last token with another id.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path


def main(model: str, pairs: str, steps: int, rate: float) -> None:
    """Train, and print the logged records."""
    from datasets import Dataset
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast
    from trl import RewardConfig, RewardTrainer

    vocabulary = {chr(number): number for number in range(256)} | {"<end>": 256, "<pad>": 257}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="\0"))
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>"
    )
    rows = [json.loads(line) for line in Path(pairs).read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        trainer = RewardTrainer(
            model=AutoModelForSequenceClassification.from_pretrained(model, num_labels=1),
            args=RewardConfig(
                output_dir=folder,
                center_rewards_coefficient=0.01,
                per_device_train_batch_size=8,
                max_steps=steps,
                learning_rate=rate,
                lr_scheduler_type="constant",
                adam_beta2=0.95,
                weight_decay=0.0,
                max_grad_norm=1.0,
                train_sampling_strategy="sequential",
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                max_length=None,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        trainer.train()
    logged = [each for each in trainer.state.log_history if "accuracy" in each]
    print("\n" + json.dumps(logged))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
