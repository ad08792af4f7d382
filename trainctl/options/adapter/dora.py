"""DoRA (arXiv:2402.09353): LoRA for the directions of rows, and their lengths train beside it."""

from __future__ import annotations

from trainctl.options.adapter import Adapter, LowRank

SPEC = Adapter(
    name="dora", keys=LowRank, build="trainctl.train.adapters.layers:attach", has_magnitude=True
)
