"""Classification and regression of texts, as transformers' sequence classifiers do them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from trainctl.config.schema import ObjectiveConfig
from trainctl.config.schema.option import option
from trainctl.options.data import SampleKind
from trainctl.options.objective import RECORDS, SCORES, Head, Objective


class Labelling(Enum):
    """Kinds of labels, by the values of transformers' `problem_type`."""

    single_label = "single_label_classification"
    multi_label = "multi_label_classification"
    regression = "regression"


@dataclass
class ClassifyConfig(ObjectiveConfig):
    """Keys of classification."""

    problem: Labelling = option(
        Labelling.single_label,
        "What a text has: one class of several, any number of classes, or numbers.",
    )
    outputs: int = option(
        2, "Number of classes; of a regression, numbers of a text.", minimum=1, maximum=100_000
    )
    class_weights: list[float] = option(
        [],
        "Weight of each class, in the order of its numbers; empty weighs all equally. With several "
        "labels it weighs the texts that have the class.",
        needs=(lambda s: s.problem is not Labelling.regression, "a problem with classes"),
    )
    label_smoothing: float = option(
        0.0,
        "Share of each label that is spread over all classes.",
        minimum=0,
        maximum=1,
        needs=(
            lambda s: s.problem is Labelling.single_label,
            "objective.problem=single_label_classification",
        ),
    )


COUNTS = ("true_positives", "predicted", "labelled")
"""Sums of each class, from which F1 follows."""


def measures(section: ClassifyConfig) -> tuple[str, ...]:
    """Return the names of what is summed over texts."""
    if section.problem is Labelling.regression:
        return "mean_squared_error", "mean_absolute_error"
    return ("accuracy", *(f"{what}_{n}" for what in COUNTS for n in range(section.outputs)))


def metrics(section: ClassifyConfig, sums: Mapping[str, float], number: float) -> dict[str, float]:
    """Return accuracy and F1, or the errors of a regression.

    F1 of a class is 2 TP / (predicted + labelled). Its macro mean is over the classes that some
    text has or is predicted to have, as scikit-learn's.
    """
    means = {name: value / max(1.0, number) for name, value in sums.items()}
    if section.problem is Labelling.regression:
        return means
    f1: dict[str, float] = {}
    present = []
    for n in range(section.outputs):
        right, predicted, labelled = (sums[f"{what}_{n}"] for what in COUNTS)
        f1[f"f1_{n}"] = 2 * right / max(1.0, predicted + labelled)
        present += [f1[f"f1_{n}"]] if predicted + labelled else []
    return {"accuracy": means["accuracy"], "f1": sum(present) / max(1, len(present)), **f1}


def settings(section: ClassifyConfig) -> dict[str, Any]:
    """Return the keys of an exported `config.json`."""
    return {"problem_type": section.problem.value}


SPEC = Objective(
    name="classify",
    keys=ClassifyConfig,
    build="trainctl.train.objectives.scores:classify",
    takes=SampleKind.labelled,
    counts=RECORDS,
    reads=SCORES,
    head=Head(outputs=lambda section: section.outputs, settings=settings),
    measures=measures,
    metrics=metrics,
    whole_samples="a text's score is that of its last token",
)
