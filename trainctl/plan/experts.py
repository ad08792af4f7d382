"""Load balancing of the experts in a plan."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.derived import Derived
from trainctl.config.schema import RunConfig


def auxiliary_loss(config: RunConfig) -> float:
    """Return the weight of the balancing loss: the config's, otherwise the model directory's."""
    own = config.experts.auxiliary_loss
    return own if own is not None else config.model.router_aux_loss_coef or 0.0


def reasons(config: RunConfig) -> Iterator[Derived]:
    """Yield the weight of the balancing loss if it comes from the model directory."""
    asked = config.model.router_aux_loss_coef
    if config.experts.auxiliary_loss is None and asked and config.trains_itself:
        why = "router_aux_loss_coef of config.json, whose output_router_logits is true"
        yield Derived(key="experts.auxiliary_loss", value=asked, reason=why)
