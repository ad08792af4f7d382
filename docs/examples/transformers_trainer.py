"""The transformers Trainer under trainctl, which gives it DeepSpeed's JSON and its figures.

    trainctl launch script=transformers_trainer.py script_config_flag=--deepspeed recipe=tiny

Trainer refuses a JSON that disagrees with its own arguments, so both come from the same plan.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
"""What the plan calls as transformers does."""


class Counting(Dataset):
    """Sequences that count upwards from anywhere, so that there is something to learn."""

    def __init__(self, samples: int, length: int, vocabulary: int) -> None:
        self.samples, self.length, self.vocabulary = samples, length, vocabulary

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(self.length) + index) % self.vocabulary
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", required=True, help="DeepSpeed's JSON")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    plan = json.loads(Path(os.environ["TRAINCTL_PLAN"]).read_text())
    config, batch = plan["config"], plan["batch"]
    shape, optimizer = config["model"], config["optimizer"]

    training = TrainingArguments(
        output_dir=Path(os.environ["TRAINCTL_RUN_DIR"], "trainer"),
        deepspeed=arguments.deepspeed,
        max_steps=arguments.steps,
        per_device_train_batch_size=batch["micro_batch_size"],
        gradient_accumulation_steps=batch["gradient_accumulation_steps"],
        learning_rate=optimizer["lr"],
        weight_decay=optimizer["weight_decay"],
        adam_beta1=optimizer["beta1"],
        adam_beta2=optimizer["beta2"],
        adam_epsilon=optimizer["epsilon"],
        max_grad_norm=optimizer["gradient_clipping"],
        bf16=config["precision"]["compute"] == "bf16",
        fp16=config["precision"]["compute"] == "fp16",
        use_cpu=plan["hardware"]["accelerator"] == "cpu",
        warmup_steps=plan["warmup_steps"],
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    same = {name: shape[name] for name in SHAPE}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=shape["num_layers"], **same))
    data = Counting(10_000, batch["sequence_length"], shape["vocab_size"])
    trainer = Trainer(model=model, args=training, train_dataset=data)
    result = trainer.train()
    if training.process_index == 0:
        print(f"done: {result.global_step} steps, mean loss {result.training_loss:.4f}")
    # In this order: a rank that leaves early cuts off those that still talk, and DeepSpeed's
    # threads use the process group.
    torch.distributed.barrier()
    trainer.model_wrapped.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
