"""Contrastive learning of text embeddings: InfoNCE (arXiv:1807.03748) over the global batch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trainctl.config.schema import ObjectiveConfig
from trainctl.config.schema.option import option
from trainctl.options.data import SampleKind
from trainctl.options.objective import HIDDEN_STATES, RECORDS, Objective


class Pooling(Enum):
    """Hidden states of a text that make its embedding."""

    mean = "mean"
    last = "last"
    first = "first"


@dataclass
class ContrastiveConfig(ObjectiveConfig):
    """Keys of contrastive learning."""

    temperature: float = option(
        0.05, "Divides the cosine similarities: 1 / `scale` of sentence-transformers.", above=0
    )
    pooling: Pooling = option(
        Pooling.mean,
        "Hidden states that make a text's embedding: the mean over its tokens, the last token's "
        "(decoders), or the first token's (encoders with a CLS token).",
    )
    symmetric: bool = option(
        False,
        "Also find the query among all queries, given its similar text; the loss is the mean of "
        "both directions.",
    )


SPEC = Objective(
    name="contrastive",
    keys=ContrastiveConfig,
    takes=SampleKind.similar,
    counts=RECORDS,
    reads=HIDDEN_STATES,
    passes=2,
    build="trainctl.train.objectives.scores:embeddings",
    whole="trainctl.train.objectives.scores:contrastive",
    measures=("accuracy", "similarity"),
    whole_samples="an embedding is of a whole text",
)
