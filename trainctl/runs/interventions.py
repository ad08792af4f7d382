"""What the trainer did about a bad loss or gradient, by the records of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainctl.runs.records import number


def account(event: Mapping[str, Any]) -> str:
    """Such as ``step 7: loss 21.5 above 8.2 on rank 1 (samples 96 to 104): skip_batch``."""
    quantity = "loss" if event["kind"].startswith("loss") else "gradient norm"
    limit = "" if event["limit"] is None else f" above {number(event['limit']):.4g}"
    ranks = ", ".join(map(str, event["ranks"]))
    where = f" on rank {ranks}" if ranks else ""
    back = f" to step {event['to_step']}" if "to_step" in event else ""
    if "lr_factor" in event:
        back += f", learning rate x {event['lr_factor']:.3g} from there"
    first, end = event["samples"]
    return (
        f"step {event['step']}: {quantity} {number(event['value']):.6g}{limit}{where} "
        f"(samples {first} to {end}): {event['policy']}{back}"
    )
