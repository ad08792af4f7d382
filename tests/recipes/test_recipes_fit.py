"""The recipes of fine-tuning fit their hardware by the budget, whatever the user's data are."""

from __future__ import annotations

import pytest

from trainctl.config.compose import compose
from trainctl.hardware import resolve_hardware
from trainctl.tuning.assess import assess

PEAKS = {
    "sft-8b-lora-1x24g": 18.5,
    "sft-8b-full-8x80g": 59.1,
    "sft-70b-lora-8x80g": 45.8,
    "sft-70b-qlora-1x80g": 54.9,
    "distill-1b-8x80g": 42.2,
    "reward-8b-8x80g": 55.5,
    "classify-0.6b-1x24g": 14.4,
    "grpo-8b-8x80g": 59.3,
    "contrastive-7b-lora-8x80g": 50.0,
    "dpo-8b-lora": 54.4,
}
"""Peak of each recipe on one device, in GiB."""


@pytest.mark.parametrize("name", PEAKS)
def test_a_recipe_of_fine_tuning_fits(name: str) -> None:
    config = compose([f"recipe={name}"]).config
    found = assess(config, resolve_hardware(config.hardware))
    assert found.budget is not None, found.findings
    assert found.fits
    assert found.budget.device_peak_bytes / 2**30 == pytest.approx(PEAKS[name], abs=0.1)
