"""Sampling of tokens by counters."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainctl.options.objective import LOGITS
from trainctl.train.objectives.loss import output_of
from trainctl.train.rollouts import Sampler


def test_a_random_number_depends_on_seed_prompt_sample_and_position_alone() -> None:
    sampler = Sampler(seed=7)
    long, short = sampler.numbers(3, 2, 9), sampler.numbers(3, 2, 4)
    assert np.array_equal(long[:4], short)
    assert sampler.numbers(3, 2, 1).shape == (1,)
    others = [Sampler(8).numbers(3, 2, 9), sampler.numbers(4, 2, 9), sampler.numbers(3, 3, 9)]
    assert len({*long, *np.concatenate(others)}) == 36
    # The stream is part of a run: it must be the same with every version of numpy.
    assert long[:2].tolist() == [0.5605247226594279, 0.46596126111323566]


def test_the_numbers_are_uniform_over_prompts_samples_and_positions() -> None:
    sampler = Sampler(seed=1)
    drawn = np.concatenate([sampler.numbers(n, s, 64) for n in range(16) for s in range(16)])
    assert drawn.min() >= 0 and drawn.max() < 1
    found = np.histogram(drawn, 16, (0, 1))[0] / drawn.size
    assert np.abs(found - 1 / 16).max() < 0.004  # three standard deviations: 0.0057 / 16384**0.5


def test_tokens_come_as_often_as_their_probabilities_say() -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, -50.0, 1.5])
    sampler = Sampler(seed=1, temperature=0.7)
    numbers = torch.from_numpy(sampler.numbers(0, 0, 20_000))
    tokens, found = sampler.draw(logits.expand(20_000, -1), numbers)
    expected = (logits / 0.7).log_softmax(dim=-1)
    share = torch.bincount(tokens, minlength=5) / 20_000
    assert (share - expected.exp()).abs().max() < 0.01
    assert torch.equal(found, expected[tokens])


@pytest.mark.parametrize(
    ("sampler", "drawn"),
    [
        (Sampler(seed=1, top_k=2), {1, 3}),
        (Sampler(seed=1, top_k=9), {0, 1, 2, 3, 4}),
        (Sampler(seed=1, top_p=0.5), {3}),
        (Sampler(seed=1, top_p=0.7), {1, 3}),
        (Sampler(seed=1, top_p=0.85), {1, 2, 3, 4}),  # 2 and 4 are equals: both or none
        (Sampler(seed=1, top_k=2, top_p=0.6), {3}),  # 0.5 of 0.75 is over 0.6
    ],
)
def test_truncation_limits_what_is_drawn_and_not_the_log_probability(
    sampler: Sampler, drawn: set[int]
) -> None:
    logits = torch.tensor([0.05, 0.25, 0.1, 0.5, 0.1]).log()
    numbers = torch.linspace(0, 1 - 2**-53, 400, dtype=torch.float64)
    tokens, found = sampler.draw(logits.expand(400, -1), numbers)
    assert set(tokens.tolist()) == drawn
    assert torch.allclose(found, logits[tokens])


def test_the_ends_of_the_interval_draw_possible_tokens_only() -> None:
    logits = torch.tensor([[-torch.inf, 0.3, 0.1, -torch.inf]]).expand(2, -1)
    numbers = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert Sampler(seed=0).draw(logits, numbers)[0].tolist() == [1, 2]


def test_logits_that_are_not_numbers_draw_an_id_of_the_vocabulary() -> None:
    logits = torch.full((2, 4), torch.nan)
    tokens, found = Sampler(seed=0, top_k=2, top_p=0.9).draw(logits, torch.tensor([0.0, 0.9]), 3)
    assert tokens.max() < 3 and found.isnan().all()  # the loss is NaN, which the run guards


def test_the_trainer_divides_narrow_logits_as_the_sampler_does() -> None:
    logits = (20 * torch.randn(2, 3, 50, generator=torch.manual_seed(1))).bfloat16()
    model = SimpleNamespace(logits=logits)
    found = output_of(lambda: model, LOGITS, {}, torch.zeros(2, 3), temperature=0.7)
    token, expected = Sampler(1, 0.7).draw(logits[0, 0][None], torch.tensor([0.4]).double())
    assert torch.equal(found[0, 0].log_softmax(dim=-1)[token], expected)


@pytest.mark.gpu
def test_a_gpu_draws_the_same_tokens_with_deterministic_kernels() -> None:
    sampler = Sampler(seed=1, top_k=40, top_p=0.9)
    logits = torch.randn(64, 100, generator=torch.manual_seed(1))
    numbers = torch.from_numpy(sampler.numbers(0, 0, 64))
    torch.use_deterministic_algorithms(True)
    try:
        found, _ = sampler.draw(logits.cuda(), numbers.cuda())
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found.cpu(), sampler.draw(logits, numbers)[0])
