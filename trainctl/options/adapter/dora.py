"""DoRA (arXiv:2402.09353): LoRA on the directions of rows, with trained lengths of the rows."""

from __future__ import annotations

from trainctl.options.adapter import Adapter, LowRank

SPEC = Adapter(
    name="dora", keys=LowRank, build="trainctl.train.adapters.layers:attach", has_magnitude=True
)
