"""Which documents of a corpus stay, and why the others go: the rules, and what comes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.data.quality.columns import Columns, ColumnWriter
from trainctl.data.quality.hashing import Bool

CONTAMINATED, EXACT, NEAR, SUBSTRING = "contamination", "exact", "near", "substring"
EXAMPLES = 5
"""Documents that are kept by name for each source and reason."""


@dataclass(frozen=True, slots=True)
class Contamination:
    """When passages of held-out texts remove a document."""

    min_ngrams: int = 1
    """Least n-grams that it has of them."""
    max_documents: int | None = 10
    """An n-gram that more documents of different texts have is boilerplate, and does not count;
    None counts all."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What removes a document."""

    filters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The keys of each source's filters: `{source: {filter: keys}}`."""
    contamination: Contamination | None = None
    """None removes none by that."""
    exact: bool = True
    """Whether copies go; they do wherever what is nearly the same does."""
    near: float | None = None
    """The Jaccard index from which documents are nearly the same; None keeps them."""
    substring: float | None = None
    """The share of a document's words in passages that earlier ones have, from which it goes; None
    keeps it."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What a reason removes of a source."""

    documents: int
    """That go for it and for none before it."""
    characters: int
    applies: int
    """Documents that it applies to, those among them that went before it."""


@dataclass(frozen=True, slots=True)
class Example:
    """A document that went."""

    source: str
    part: str
    number: int
    """Its number in the part."""
    value: float | None = None
    """The filter's number, the n-grams that it has of held-out texts, its Jaccard index, or the
    share of its words that are in shared passages; None where it is not finite."""
    like: tuple[str, str, int] | None = None
    """The document that stays in its place: source, part and number."""
    word: int | None = None
    """The first word of the first held-out passage (`contamination.passage`)."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What stays of a corpus."""

    why: npt.NDArray[np.uint8]
    """0 for a document that stays; else 1 + the index of the first reason, [documents]."""
    reasons: tuple[str, ...]
    """Their names, in the order in which they are applied: `gopher_quality.min_words`."""
    counts: Mapping[str, Mapping[str, Tally]]
    """`{source: {reason: Tally}}`, of reasons that apply to some document."""
    examples: Mapping[str, Mapping[str, tuple[Example, ...]]]
    """`{source: {reason: some of the documents that went for it}}`."""
    common_ngrams: int
    """N-grams of held-out texts that were taken as boilerplate."""
    parts: tuple[tuple[str, str, int], ...]
    """Source, part and first id of each part."""

    @property
    def stays(self) -> Bool:
        """Which documents are trained on, [documents]."""
        stays: Bool = self.why == 0
        return stays

    def write(self, folder: Path, key: str) -> None:
        """Keep it, under a key of what it depends on."""
        with ColumnWriter(folder, key) as writer:
            writer.append({"why": self.why})
            writer.finish(
                reasons=self.reasons,
                counts={
                    source: {reason: asdict(each) for reason, each in of.items()}
                    for source, of in self.counts.items()
                },
                examples={
                    source: {reason: [asdict(each) for each in some] for reason, some in of.items()}
                    for source, of in self.examples.items()
                },
                common_ngrams=self.common_ngrams,
                parts=self.parts,
            )

    @classmethod
    def load(cls, folder: Path) -> Selection:
        """What was written.

        Raises:
            TrainctlError: It is not there, or damaged (exit code 5).
        """
        columns = Columns.load(folder)
        facts = columns.manifest
        return cls(
            why=columns["why"],
            reasons=tuple(facts["reasons"]),
            counts={
                source: {reason: Tally(**each) for reason, each in of.items()}
                for source, of in facts["counts"].items()
            },
            examples={
                source: {reason: tuple(map(example_of, some)) for reason, some in of.items()}
                for source, of in facts["examples"].items()
            },
            common_ngrams=facts["common_ngrams"],
            parts=tuple(map(tuple, facts["parts"])),
        )


def example_of(data: dict[str, Any]) -> Example:
    """Return one that was written as JSON."""
    like = data["like"]
    return Example(**{**data, "like": tuple(like) if like is not None else None})
