"""Models of several widths, trained for a few steps: how activations depend on the width.

`scripts/coordinate_check.py` prints the result, `test_mup.py` checks it against muP's promise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mup_probe import Sizes
from rank_processes import Case, tiny_config, tiny_plan, train_cases

from trainctl.config.schema import RunConfig
from trainctl.runs.layout import RunPaths

WIDTHS = (64, 128, 256, 512)
HEAD_DIM = 16
SEEDS = (1, 2)
STEPS = 4

LEARNING_RATES = {"muon": 0.02, "sgd": 0.1}
"""Learning rates, large enough that a few steps dominate the initial activations."""

LIMIT = 0.2
"""Largest absolute slope of log(size) over log(width) that counts as flat, for sizes and
changes.
"""
LOGITS_LIMIT = 0.6
"""Steepest allowed fall of the logits: initially they fall as 1 / sqrt(width), and SGD's few steps
do not outgrow that.
"""


@dataclass(frozen=True)
class Check:
    """Result of a check."""

    sizes: Mapping[int, Sizes]
    slopes: Mapping[tuple[str, str], float]
    """d log(size) / d log(width), by measurement and place."""

    @property
    def is_flat(self) -> bool:
        """Return True if no size grows or shrinks with the width."""
        return all(
            -(LOGITS_LIMIT if place == "logits" else LIMIT) < slope < LIMIT
            for (_, place), slope in self.slopes.items()
        )


def of_width(
    width: int,
    *,
    mup: bool,
    family: str = "llama",
    optimizer: str = "adamw",
    steps: int = STEPS,
    seed: int = 1,
) -> RunConfig:
    """Return two blocks of this width; the head size is fixed, everything else is proportional."""
    heads = width // HEAD_DIM
    return tiny_config(
        steps=steps,
        seed=seed,
        sequence_length=64,
        global_batch_size=4,
        gradient_accumulation_steps=1,
        evaluation_samples=4,
        sample_tokens=0,
        model__family=family,
        model__num_layers=2,
        model__hidden_size=width,
        model__intermediate_size=3 * width,
        model__num_attention_heads=heads,
        model__num_key_value_heads=None if family == "gpt2" else heads // 2,
        model__initializer_range=0.1,
        precision__compute="fp32",
        zero_stage__stage=0,
        optimizer__kind=optimizer,
        optimizer__lr=LEARNING_RATES.get(optimizer, 1e-2),
        optimizer__weight_decay=0.0,
        optimizer__gradient_clipping=0.0,
        schedule__kind="constant",
        schedule__warmup_steps=0,
        checkpoint__at_end=False,
        **({"model__mup": True, "model__mup_base_width": WIDTHS[0]} if mup else {}),
    )


def check(
    folder: Path,
    *,
    mup: bool,
    family: str = "llama",
    optimizer: str = "adamw",
    widths: Sequence[int] = WIDTHS,
    seeds: Sequence[int] = SEEDS,
) -> Check:
    """Train every width in one process, and compare.

    Args:
        folder: Empty folder for the runs.
        mup: Use muP, with the smallest of `WIDTHS` as its base.
        seeds: Seeds whose sizes are averaged.
    """
    cases = []
    for width in widths:
        for seed in seeds:
            config = of_width(width, mup=mup, family=family, optimizer=optimizer, seed=seed)
            cases.append(Case(tiny_plan(config, 1), RunPaths(folder / f"{width}-{seed}")))
    (results,) = train_cases(1, cases, probe="mup_probe:sizes")
    by_width = {
        width: _mean(results[index * len(seeds) : (index + 1) * len(seeds)])
        for index, width in enumerate(widths)
    }
    first = by_width[widths[0]]
    slopes = {
        (measure, place): _slope({w: by_width[w][place][measure] for w in widths})
        for place in first
        for measure in first[place]
    }
    return Check(by_width, slopes)


def _mean(results: Sequence[Sizes]) -> Sizes:
    return {
        place: {
            measure: sum(sizes[place][measure] for sizes in results) / len(results)
            for measure in results[0][place]
        }
        for place in results[0]
    }


def _slope(values: Mapping[int, float]) -> float:
    """Return the slope of the least-squares line through the logarithms."""
    points = [(math.log(width), math.log(value)) for width, value in values.items()]
    mean_x, mean_y = (sum(point[axis] for point in points) / len(points) for axis in (0, 1))
    above = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return above / sum((x - mean_x) ** 2 for x, _ in points)


def table(result: Check) -> str:
    """Format the slopes, and the sizes that they are fitted to."""
    widths = list(result.sizes)
    lines = [f"{'':22}{''.join(f'{width:>10}' for width in widths)}     slope"]
    for (measure, place), slope in result.slopes.items():
        sizes = "".join(f"{result.sizes[width][place][measure]:10.4f}" for width in widths)
        lines.append(f"{place:14}{measure:8}{sizes}{slope:+10.2f}")
    return "\n".join(lines)
