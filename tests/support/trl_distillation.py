"""A plain loop with the divergence of TRL's GKD: `MODEL TEACHER TOKENS BETAS`, in its own process.

Prints for each beta the loss and the gradient norm of every step, as JSON. TOKENS is a file of
torch with the ids of each step, (steps, samples, length).
"""

from __future__ import annotations

import json
import sys

import torch


def main(model: str, teacher: str, tokens: str, betas: str) -> None:
    """Train the model once for each beta, and print the records."""
    from transformers import AutoModelForCausalLM
    from trl.experimental.gkd import GKDTrainer

    torch.set_num_threads(1)
    taught = AutoModelForCausalLM.from_pretrained(teacher).eval()
    found = []
    for beta in json.loads(betas):
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
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
