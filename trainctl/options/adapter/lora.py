"""LoRA (arXiv:2106.09685): adds a product of two narrow matrices to each layer."""

from __future__ import annotations

from trainctl.options.adapter import Adapter, LowRank

SPEC = Adapter(name="lora", keys=LowRank, build="trainctl.train.adapters.layers:attach")
