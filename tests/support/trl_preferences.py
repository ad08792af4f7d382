"""TRL's DPOTrainer or KTOTrainer on texts, in a process of its own: `KIND MODEL FILE STEPS RATE`.

Prints the records of its steps as JSON. Its tokenizer maps an ASCII text to its bytes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path


def main(kind: str, model: str, file: str, steps: int, rate: float) -> None:
    """Train, and print the logged records."""
    from datasets import Dataset
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

    vocabulary = {chr(number): number for number in range(256)} | {"<end>": 256}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="\0"))
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    end = "<end>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, pad_token=end)
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    trainer_class, config = {"dpo": (DPOTrainer, DPOConfig), "kto": (KTOTrainer, KTOConfig)}[kind]
    of_kind = {"undesirable_weight": 0.2} if kind == "kto" else {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            model=AutoModelForCausalLM.from_pretrained(model),
            args=config(
                output_dir=folder,
                beta=0.1,
                **of_kind,
                precompute_ref_log_probs=True,
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
    logged = [each for each in trainer.state.log_history if "loss" in each]
    print("\n" + json.dumps(logged))


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), float(sys.argv[5]))
