"""Small model that can copy and compute, pre-trained on the spot, and a chat corpus with such
tasks.

The model is pre-trained on lines such as `twice 7 for ann=14`, and has seen no conversation. The
chat corpus asks the same, with answers that can be checked, also for held-out questions.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from chat_files import asked, write_tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

NAMES = ("ann", "bob", "eve", "joe", "kim", "leo", "max", "pam", "sue", "tom")
WORDS = (*NAMES, "copy", "next", "twice", "for", "=", "user", "assistant")
EVERY = [
    (f"{task} {digit} for {name}", answer)
    for digit in range(10)
    for name in NAMES
    for task, answer in (
        ("copy", f"{digit}"),
        ("next", f"{digit + 1}"),
        ("twice", f"{2 * digit}"),
    )
]
"""Every question with its answer."""
_SIZE = 64


def write_base(folder: Path, *, steps: int = 150, seed: int = 0) -> float:
    """Pre-train the model and save it with its tokenizer; return the last loss.

    Args:
        folder: Output folder for the transformers directory.
        steps: Updates, of 32 texts of 64 tokens.
        seed: Seed of the weights and the texts.
    """
    write_tokenizer(folder, words=WORDS)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            initializer_range=0.1,  # learns several times as fast as a smaller width
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * max(0.05, 1 - step / steps)
    )
    for _ in range(steps):
        ids = torch.tensor([_line_ids(tokenizer, draw) for _ in range(32)])
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(str(folder))
    return float(loss.detach())


def _line_ids(tokenizer: Any, draw: random.Random) -> list[int]:
    text = "".join("{}={}\n".format(*draw.choice(EVERY)) for _ in range(_SIZE // 8))
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids[:_SIZE]


def questions(seed: int = 1) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return training questions and 100 held-out questions, with their answers."""
    every = list(EVERY)
    random.Random(seed).shuffle(every)
    return every[100:], every[:100]


def write_chat(file: Path, pairs: list[tuple[str, str]]) -> Path:
    """Write one conversation of a single turn per line."""
    file.write_text("".join(json.dumps({"messages": asked(pair)}) + "\n" for pair in pairs))
    return file


def share_right(folder: Path, pairs: list[tuple[str, str]], model: Any = None) -> float:
    """Return the share of questions that a model answers exactly by greedy decoding in
    transformers.

    Args:
        folder: An exported model with its tokenizer.
        pairs: Questions and their answers.
        model: Model to use in place of the exported one.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(folder), padding_side="left")
    model = model or LlamaForCausalLM.from_pretrained(str(folder))
    prompts = [[{"role": "user", "content": question}] for question, _ in pairs]
    batch = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    with torch.no_grad():
        ids = model.generate(**batch, max_new_tokens=4, do_sample=False)
    answers = tokenizer.batch_decode(
        ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=False
    )
    end = tokenizer.eos_token
    right = [text.startswith(a + end) for text, (_, a) in zip(answers, pairs, strict=True)]
    return sum(right) / len(right)
