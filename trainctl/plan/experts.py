"""Experts of a plan: what keeps them equally busy."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.derived import Derived
from trainctl.config.schema import RunConfig


def auxiliary_loss(config: RunConfig) -> float:
    """Weight of the balancing loss: the run's, or what the model's directory asks for."""
    own = config.experts.auxiliary_loss
    return own if own is not None else config.model.router_aux_loss_coef or 0.0


def reasons(config: RunConfig) -> Iterator[Derived]:
    """Where the weight comes from, if the config leaves it to the directory."""
    asked = config.model.router_aux_loss_coef
    if config.experts.auxiliary_loss is None and asked and config.trains_itself:
        why = "router_aux_loss_coef of config.json, whose output_router_logits is true"
        yield Derived(key="experts.auxiliary_loss", value=asked, reason=why)
