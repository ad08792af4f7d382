"""Reinforcement by rewards: losses and advantages, which are TRL's and the papers'."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainctl.config.registry import new_section
from trainctl.engines.micro_batch import IGNORED_LABEL
from trainctl.options.objective.grpo import Advantage, NormalizeBy, Ratio
from trainctl.train.objectives.base import ObjectiveLoss
from trainctl.train.objectives.grpo import advantages_of, divisors_of

ANSWERS, LENGTH, LONGEST = 6, 9, 12


def test_advantages_match_their_papers():
    rewards = np.array([[1.0, 0.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0]], np.float32)
    first = rewards[0]
    expected = {
        Advantage.standardized: (first - 1) / (first.std(ddof=1) + 1e-4),
        Advantage.centered: first - 1,
        Advantage.leave_one_out: [1 - 1, 0 - 4 / 3, 0 - 4 / 3, 3 - 1 / 3],
    }
    for kind, values in expected.items():
        section = new_section("objective", "grpo", advantage=kind)
        found = advantages_of(section, rewards)
        assert found[0] == pytest.approx(values, abs=1e-6), kind
        assert found[1].tolist() == [0.0] * 4
        # An answer that no reward judges neither learns nor moves the mean of the others.
        unjudged = np.array([[1.0, np.nan, 0.0, 3.0]], np.float32)
        without = advantages_of(section, np.array([[1.0, 0.0, 3.0]], np.float32))
        assert advantages_of(section, unjudged)[0, [0, 2, 3]] == pytest.approx(without[0])
        assert advantages_of(section, unjudged)[0, 1] == 0


VARIANTS = {
    "grpo": ({}, {"loss_type": "grpo"}),
    "grpo with kl": ({"kl_weight": 0.1}, {"loss_type": "grpo", "beta": 0.1}),
    "gspo": ({"ratio": Ratio.sequence}, {"loss_type": "grpo", "level": "sequence"}),
    "dapo": (
        {"normalize_by": NormalizeBy.tokens, "clip_high": 0.28},
        {"loss_type": "dapo", "high": 0.28},
    ),
    "dr_grpo": (
        {"normalize_by": NormalizeBy.length, "max_answer_tokens": LONGEST},
        {"loss_type": "dr_grpo"},
    ),
    "importance": ({"importance_cap": 1.1}, {"loss_type": "grpo", "vllm": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_losses_and_gradients_match_trl(name: str):
    """TRL's own loss function gets the log-probabilities that ours gets."""
    from trl import GRPOTrainer

    ours, theirs = VARIANTS[name]
    torch.manual_seed(3)
    logs = (-3 * torch.rand(ANSWERS, LENGTH)).requires_grad_()
    old = logs.detach() + 0.3 * torch.randn(ANSWERS, LENGTH)
    sampled, reference = (old + 0.2 * torch.randn(ANSWERS, LENGTH) for _ in range(2))
    advantages = torch.randn(ANSWERS)
    lengths = torch.tensor([9, 1, 4, 7, 2, 9])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    weights = torch.exp((old - sampled) * mask).clamp(max=1.1)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logs, torch.zeros_like(logs), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=theirs.get("level", "token"),
        beta=theirs.get("beta", 0.0),
        loss_type=theirs["loss_type"],
        epsilon_low=0.2,
        epsilon_high=theirs.get("high", 0.2),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        use_vllm="vllm" in theirs,
        vllm_importance_sampling_correction=True,
        max_completion_length=LONGEST,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x, sync_gradients=True
        ),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(ANSWERS, 1, dtype=torch.long),
        "prompt_mask": torch.ones(ANSWERS, 1),
        "completion_ids": torch.zeros(ANSWERS, LENGTH, dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "importance_sampling_ratio": weights,
        "num_items_in_batch": mask.sum(),
    }
    expected = GRPOTrainer._compute_loss(trainer, None, inputs)
    expected.backward()
    gradient, logs.grad = logs.grad, None
    section = new_section("objective", "grpo", updates=2, **ours)
    stored = {
        "sampled": sampled if "vllm" in theirs else old,
        "old": old,
        "reference": reference,
        "advantages": advantages,
        "divisors": torch.from_numpy(divisors_of(section, lengths.numpy())),
        "mean_tokens": torch.full((ANSWERS,), float(lengths.float().mean())),
    }
    beside = {"documents": torch.zeros_like(mask), "stored": stored}
    labels = torch.where(mask.bool(), 1, IGNORED_LABEL)
    loss, measures = ObjectiveLoss(section)(logs, labels, beside)
    (loss / ANSWERS).backward()
    assert loss.item() / ANSWERS == pytest.approx(expected.item(), rel=1e-6), name
    torch.testing.assert_close(logs.grad, gradient, rtol=1e-5, atol=1e-8)
    recorded = trainer._metrics["train"]
    (clipped,) = recorded["clip_ratio/region_mean"]
    assert float(measures[:, 3].mean()) == pytest.approx(clipped, rel=1e-5)
    if "kl" in recorded:
        assert float(measures[:, 4].mean()) == pytest.approx(recorded["kl"][0], rel=1e-5)
