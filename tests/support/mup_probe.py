"""Runs inside a rank for the coordinate check: size of activations before and after a few
updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from rank_processes import Case
from torch import nn

from trainctl.engines.process import Process
from trainctl.plans.mixture import SINGLE_SOURCE
from trainctl.train.evaluation import inference
from trainctl.train.loop import Trainer
from trainctl.train.models.model import blocks_of, family_of
from trainctl.train.session import Session, assemble

Sizes = dict[str, dict[str, float]]
"""Mean absolute value of an element and its mean absolute change, by place in the model."""


def sizes(cases: list[Case], process: Process) -> list[Sizes]:
    """Train each case to its plan's end; return its activations on one held-out batch."""
    results = []
    for case in cases:
        session = assemble(case.plan, case.run, process)
        before = activations(session)
        Trainer(session, None).train()
        after = activations(session)
        results.append(
            {
                place: {
                    "size": float(after[place].abs().mean()),
                    "change": float((after[place] - before[place]).abs().mean()),
                }
                for place in after
            }
        )
        session.engine.close()
    return results


def activations(session: Session) -> dict[str, torch.Tensor]:
    """Return the activations of the first held-out samples by place, in fp32."""
    number = session.plan.batch.micro_batch_size
    batch = session.held_out[SINGLE_SOURCE].micro_batch(np.arange(number))
    model: Any = session.engine.deepspeed.module.model
    with inference(session.engine.module), _watched(model) as outputs:
        session.engine.output(batch)
    return outputs


@contextmanager
def _watched(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Record the outputs of the forward pass at each place within the context."""
    family = family_of(model)
    decoder, last = getattr(model, family.decoder), blocks_of(model)[-1]
    places: dict[str, nn.Module] = {
        "embedding": getattr(decoder, family.embedding),
        "attention": getattr(last, family.regions[0].module),
        "feed-forward": getattr(last, family.regions[1].module),
        "last block": last,
        "final norm": getattr(decoder, family.final_norm),
        "logits": getattr(model, family.head),
    }
    outputs: dict[str, torch.Tensor] = {}

    def keep(place: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            values = output[0] if isinstance(output, tuple) else output
            outputs[place] = values.detach().float()

        return hook

    handles = [module.register_forward_hook(keep(place)) for place, module in places.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
