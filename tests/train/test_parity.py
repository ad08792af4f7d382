"""Every layout that a plan allows gives the curve of one process.

The whole product is `scripts/parity.py`; here every pair of choices is had once, in few steps.
"""

import functools
from dataclasses import replace

import pytest
from parity_cases import (
    CLIPPED_STEPS,
    CLIPPING,
    MODULE,
    STEPS,
    Combination,
    Difference,
    clips_enough,
    judge,
    limit,
    pairs,
    pairwise,
    product,
    train,
    train_all,
)

from trainctl.config.registry import new_section

FEW, IN_BF16 = 4, 15
"""Steps; in bf16 enough of them that rounding errors are measurable as the reference spread."""
TOKENS, TOKENS_IN_BF16, TOKENS_OF_LARGE_IN_BF16 = 32, 128, 16
"""Tokens of a sample."""
FROM_MEMORY = {"nvme-optimizer": "cpu", "nvme": "cpu-all"}
"""Offload that computes the same, without a drive."""

OWN = tuple(
    Combination(layout, stage, checkpointing=checkpointing, model=MODULE)
    for layout, stage, checkpointing in (
        ("DP2", "2", "none"),
        ("DP2", "3", "full"),
        ("TP2", "0", "none"),
        ("TP2", "3", "full"),
        ("PP2", "0", "full"),
        ("PP2", "1", "none"),
        ("FSDP2", "3", "none"),
    )
)
"""Layouts of a module that is not of transformers."""

MODELS = ("llama", "mistral-untied", "qwen3", "gpt2-untied")
"""Model families with tied and untied embeddings."""


@functools.cache
def legal():
    """Return the wanted combinations whose layout the planner allows. Legality does not depend on
    model or precision.
    """
    layouts = product(precision=["fp32"], model=["llama"])
    allowed = {places(c) for c in layouts if judge(c).plan is not None}
    return tuple(c for c in product(model=MODELS) if places(c) in allowed and is_wanted(c))


def is_wanted(combination):
    """Whether the plan allows it, and it is not a large model other than the reference's, which
    would take long."""
    is_other = combination.large and combination.model != "llama"
    return not is_other and judge(combination).plan is not None


def places(combination):
    return combination.layout, combination.stage, combination.offload, combination.checkpointing


@functools.cache
def quick():
    """Pairs that need no compiler and two processes only."""
    return tuple(pairwise(c for c in product(model=MODELS) if is_quick(c) and is_wanted(c)))


def is_quick(combination):
    return (
        combination.world_size == 2
        and combination.offload == "none"
        and combination.checkpointing in ("none", "full", "selective")
        and combination.precision == "fp32"
        and combination.model in ("llama", "gpt2-untied")
    )


@functools.cache
def rest():
    """Return combinations that cover all pairs which `quick` does not cover."""
    return tuple(pairwise(legal(), covered=quick()))


def size(combination):
    """Steps and tokens."""
    if combination.precision == "fp32":
        return FEW, TOKENS
    if combination.large:
        return FEW, TOKENS_OF_LARGE_IN_BF16
    return IN_BF16, TOKENS_IN_BF16


def held_against(combination):
    """Return the reference combination, and the combination that measures the tolerance, if any."""
    if combination.large and combination.precision == "bf16":
        # Enough steps of a large model would be dear; what a drive may change is less.
        return replace(combination, offload=FROM_MEMORY[combination.offload]), None
    return combination.reference, combination.spread


def assert_parity(folder, combinations, *, together=False):
    """Train them all, then say of each that is off by how much."""
    wanted = [each for c in combinations for each in (c, *held_against(c)) if each is not None]
    curves = train_all(wanted, folder, size, together=together)
    wrong = {}
    for combination in combinations:
        reference, spread = held_against(combination)
        found = Difference.between(curves[reference], curves[combination])
        if reference.offload != "none":
            allowed = Difference(0.0, 0.0)
        else:
            assert clips_enough(curves[reference]), reference
            allowed = limit(spread and Difference.between(curves[reference], curves[spread]))
        if not found.within(allowed):
            wrong[str(combination)] = found
    assert not wrong, wrong


def test_quick_pairs(tmp_path):
    assert_parity(tmp_path, quick(), together=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # DeepSpeed compiles what offload needs when it is first used
def test_all_other_pairs(tmp_path):
    assert_parity(tmp_path, rest(), together=True)


@pytest.mark.slow
def test_a_module_of_ones_own(tmp_path):
    assert_parity(tmp_path, OWN, together=True)


@pytest.mark.slow
def test_the_pairs_are_all_pairs():
    wanted = set().union(*map(pairs, legal()))
    assert set().union(*map(pairs, (*quick(), *rest()))) == wanted
    assert len(quick()) + len(rest()) < 80 < len(legal())


@pytest.mark.slow
def test_long_curves_agree_and_learn(tmp_path):
    reference = train(Combination(), tmp_path)
    assert sum(norm > CLIPPING for _, norm in reference.values()) >= CLIPPED_STEPS
    assert reference[STEPS][0] < reference[1][0] - 0.8
    for layout, stage in (("1", "3"), ("DP2", "2"), ("TP2", "3"), ("PP2", "0"), ("SP2", "1")):
        other = train(Combination(layout=layout, stage=stage), tmp_path)
        assert Difference.between(reference, other).within(limit(None)), layout


@pytest.mark.slow
def test_the_first_step_in_bf16_is_the_same_at_every_stage(tmp_path):
    """DeepSpeed makes a hidden first step at stage 0, which would shift Adam's bias correction."""
    stages = [Combination("DP2", stage, precision="bf16") for stage in "0123"]
    zero, *others = [
        train(combination, tmp_path, steps=FEW, tokens=TOKENS) for combination in stages
    ]
    for other in others:
        difference = Difference.between(zero, other)
        assert difference.loss < 2e-3 and difference.norm < 5e-3


def test_masked_documents_are_masked_on_every_layout(tmp_path):
    """Sequence parallelism is left out: the planner refuses it with masked documents."""
    texts, held_out = tmp_path / "short.jsonl", tmp_path / "held_out.jsonl"
    for file in (texts, held_out):  # several documents in every sample
        file.write_text("".join(f'{{"text": "{n} squared: {n * n}"}}\n' for n in range(4000)))
    data = new_section("data", "files", paths=[str(texts)], held_out_paths=[str(held_out)])
    masked = replace(data, mask_documents=True)
    plain = train(Combination(), tmp_path, steps=FEW, tokens=TOKENS, data=data)
    one, *others = (
        train(Combination(layout), tmp_path, steps=FEW, tokens=TOKENS, data=masked)
        for layout in ("1", "DP2", "TP2", "PP2")
    )
    assert Difference.between(plain, one).norm > 1e-3
    for other in others:
        assert Difference.between(one, other).within(limit(None))
