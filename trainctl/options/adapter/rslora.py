"""LoRA whose scale falls with the root of the rank (arXiv:2312.03732), so that ranks are
comparable.
"""

from __future__ import annotations

from trainctl.options.adapter import Adapter, LowRank

SPEC = Adapter(
    name="rslora", keys=LowRank, build="trainctl.train.adapters.layers:attach", rank_power=0.5
)
