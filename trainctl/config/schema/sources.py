"""Data mixture: sources with their shares of the run, and stages of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainctl.config.schema.option import option


@dataclass
class SourceConfig:
    """A source of a mixture: the keys of its kind of data, and its share of the run.

    `config.registry.part_class` combines this class with the kind's class. A source does not have
    the keys that apply to the whole run.
    """

    units: ClassVar[str] = "data"
    is_part: ClassVar[bool] = True

    kind: str = option(
        "files",
        "Kind of data, as in data.kind; if omitted, the kind that reads files with these suffixes.",
        units="data",
    )
    weight: float | None = option(
        None,
        "Fraction of the tokens of the run: weights sum to 1, or are whole numbers in proportion.",
        above=0,
    )
    tokens: int | None = option(
        None, "Tokens of this source in the run, in place of weight.", unit="tokens", minimum=1
    )
    epochs: float | None = option(
        None, "Passes over this source's training text in the run, in place of weight.", above=0
    )
    max_epochs: float | None = option(
        None,
        "Maximum passes over this source; a run that needs more is refused; none sets no limit.",
        above=0,
    )
    shuffle_shards: int | None = option(
        None,
        "Shuffle window, in shards of 64 Mi tokens, so that no more are needed at once; none "
        "shuffles the whole source.",
        unit="shards",
        minimum=1,
    )


@dataclass
class StageConfig:
    """A part of the run with its own mixture or sequence length."""

    until: float | None = option(None, "End of the stage, as a fraction of the run.")
    until_step: int | None = option(
        None, "Last optimizer step of the stage.", unit="optimizer steps"
    )
    until_tokens: int | None = option(
        None,
        "End of the stage in tokens since the start of the run, rounded up to a step.",
        unit="tokens",
    )
    weights: dict[str, float] | None = option(
        None,
        "Weights of the sources in this stage, by name; none uses the weights of data.sources.",
    )
    sequence_length: int | None = option(
        None,
        "Sequence length in this stage, at the same number of tokens per batch; none is "
        "training.sequence_length.",
        unit="tokens",
    )
