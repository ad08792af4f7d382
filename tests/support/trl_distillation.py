"""A plain loop with the divergence of TRL's GKD, which runs in a forked process of its own."""

from __future__ import annotations

from pathlib import Path

import torch


def train(
    arguments: tuple[str, str, Path, list[float]],
) -> list[list[tuple[float, float]]]:
    """Train a model once for each beta; return the loss and the gradient norm of every step.

    Args:
        arguments: Folders of the model and the teacher, a file of torch with the ids of each step
            (steps, samples, length), and the betas.
    """
    from transformers import AutoModelForCausalLM
    from trl.experimental.gkd import GKDTrainer

    model, teacher, tokens, betas = arguments
    torch.set_num_threads(1)
    taught = AutoModelForCausalLM.from_pretrained(teacher).eval()
    found = []
    for beta in betas:
        student = AutoModelForCausalLM.from_pretrained(model)
        optimizer = torch.optim.AdamW(
            student.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0
        )
        steps = []
        for ids in torch.load(tokens):
            with torch.no_grad():
                target = taught(ids).logits
            loss = GKDTrainer.generalized_jsd_loss(
                student(ids).logits, target, beta=beta, num_items_in_batch=ids.numel()
            )
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps.append((float(loss), float(norm)))
        found.append(steps)
    return found
