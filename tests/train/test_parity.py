"""Every layout that a plan allows gives the curve of one process.

The whole product is `scripts/parity.py`; here every pair of choices is had once, in few steps.
"""

import functools
from dataclasses import replace

import pytest
from parity_cases import (
    CLIPPED_STEPS,
    CLIPPING,
    DEEP,
    DOCUMENTS,
    MODULE,
    ONE_HEAD,
    STEPS,
    Combination,
    Difference,
    clips_enough,
    judge,
    limit,
    pairs,
    pairwise,
    product,
    short_documents,
    train,
    train_all,
)

FEW, OF_DEEP, IN_BF16 = 3, 4, 15
"""Steps; in bf16 enough of them that rounding errors are measurable as the reference spread."""
TOKENS, LONG_TOKENS, TOKENS_OF_LARGE_IN_BF16 = 32, 128, 16
"""Tokens of a sample."""
FROM_MEMORY = {"nvme-optimizer": "cpu", "nvme": "cpu-all"}
"""Offload that computes the same, without a drive."""
PAIRED = ("none", "cpu", "cpu-all", "nvme")
"""Offload of the pairs. The other kinds are had once; `scripts/parity.py` has all."""

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

BESIDE = (
    Combination("DP2", "3", "ratio-0.5"),
    Combination("DP2", "3", "nvme-optimizer", "selective", large=True),
    *(Combination("HSDP4", stage) for stage in "23"),
    *(Combination("TP4", stage) for stage in "0123"),
    Combination("TP2", "3", model=ONE_HEAD),
    Combination("CP4", "2", model=DOCUMENTS),
    Combination("CP4", "3", checkpointing="selective", model=DOCUMENTS),
    Combination("SP2xCP2", "1", checkpointing="full", model=DOCUMENTS),
    Combination("TP2xCP2", "3", model=DOCUMENTS),
    Combination("PP2V", "0", checkpointing="full", model=f"{DEEP}-llama"),
    Combination("PP2V", "1", model=f"{DEEP}-{DOCUMENTS}"),
    Combination("PP2V", "1", model=f"{DEEP}-{MODULE}"),
    Combination("TP2xPP2V", "1", model=f"{DEEP}-gpt2-untied"),
)
"""Other kinds of offload, shard groups, key-value heads that several tensor ranks have, rings of
attention, DualPipeV.
"""

MODELS = ("llama", "mistral-untied", "qwen3", "gpt2-untied")
"""Model families with tied and untied embeddings."""


@functools.cache
def legal():
    """Return the wanted combinations whose layout the planner allows. Legality does not depend on
    model or precision.
    """
    layouts = product(offload=PAIRED, precision=["fp32"], model=["llama"])
    allowed = {places(c) for c in layouts if judge(c).plan is not None}
    wanted = product(offload=PAIRED, model=MODELS)
    return tuple(c for c in wanted if places(c) in allowed and is_wanted(c))


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
        return OF_DEEP if combination.model.startswith(DEEP) else FEW, TOKENS
    if combination.large:
        return FEW, TOKENS_OF_LARGE_IN_BF16
    return IN_BF16, LONG_TOKENS


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
def test_layouts_beside_the_pairs(tmp_path):
    assert_parity(tmp_path, (*OWN, *BESIDE), together=True)


@pytest.mark.slow
def test_the_pairs_are_all_pairs():
    wanted = set().union(*map(pairs, legal()))
    assert set().union(*map(pairs, (*quick(), *rest()))) == wanted
    assert len(quick()) + len(rest()) < 80 < len(legal())


@pytest.mark.slow
def test_long_curves_agree_and_learn(tmp_path):
    places = (("1", "3"), ("DP2", "2"), ("TP2", "3"), ("PP2", "0"), ("SP2", "1"))
    others = [Combination(layout, stage) for layout, stage in places]
    whole = [Combination(), *others]
    reference, *found = train_all(
        whole, tmp_path, lambda _: (STEPS, LONG_TOKENS), together=True
    ).values()
    assert sum(norm > CLIPPING for _, norm in reference.values()) >= CLIPPED_STEPS
    assert reference[STEPS][0] < reference[1][0] - 0.8
    for combination, curve in zip(others, found, strict=True):
        assert Difference.between(reference, curve).within(limit(None)), combination


@pytest.mark.slow
def test_the_first_step_in_bf16_is_the_same_at_every_stage(tmp_path):
    """DeepSpeed makes a hidden first step at stage 0, which would shift Adam's bias correction."""
    stages = [Combination("DP2", stage, precision="bf16") for stage in "0123"]
    zero, *others = train_all(stages, tmp_path, lambda _: (FEW, TOKENS), together=True).values()
    for other in others:
        difference = Difference.between(zero, other)
        assert difference.loss < 2e-3 and difference.norm < 5e-3


def test_masked_documents_are_masked_on_every_layout(tmp_path):
    layouts = ("1", "DP2", "TP2", "PP2", "SP2", "CP2")
    plain, one, *others = [Combination(model="llama")] + [
        Combination(layout, model=DOCUMENTS) for layout in layouts
    ]
    data = short_documents()
    without = train(plain, tmp_path, steps=FEW, tokens=TOKENS, data=data)
    curves = train_all([one, *others], tmp_path, lambda _: (FEW, TOKENS), together=True)
    assert Difference.between(without, curves[one]).norm > 1e-3
    for other in others:
        assert Difference.between(curves[one], curves[other]).within(limit(None)), other
