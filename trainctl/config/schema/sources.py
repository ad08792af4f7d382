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
        "files", "As data.kind; left out, the kind that reads files of such names.", units="data"
    )
    weight: float | None = option(
        None,
        "Share of the tokens: all together are 1, or are whole numbers in proportion.",
        above=0,
    )
    tokens: int | None = option(
        None, "In place of weight: tokens of it in the run.", unit="tokens", minimum=1
    )
    epochs: float | None = option(
        None, "In place of weight: passes over its training text in the run.", above=0
    )
    max_epochs: float | None = option(
        None, "A run that needs more passes over it is refused; none repeats it at will.", above=0
    )
    shuffle_shards: int | None = option(
        None,
        "Shuffle so many shards of 64 Mi tokens at a time, so that no more are needed at once; "
        "none shuffles the whole source.",
        unit="shards",
        minimum=1,
    )


@dataclass
class StageConfig:
    """A part of the run with its own mixture or sequence length."""

    until: float | None = option(None, "Its end, as a share of the run.")
    until_step: int | None = option(
        None, "Its end: the last of its optimizer steps.", unit="optimizer steps"
    )
    until_tokens: int | None = option(
        None, "Its end: the tokens of the run so far, rounded up to a step.", unit="tokens"
    )
    weights: dict[str, float] | None = option(
        None, "Shares of sources by name; none has the weights of data.sources."
    )
    sequence_length: int | None = option(
        None,
        "Length of its samples, in batches of the same tokens; none is training.sequence_length.",
        unit="tokens",
    )
