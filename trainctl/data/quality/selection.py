"""Rules that remove documents of a corpus, and the resulting selection with its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.config.codec import to_plain
from trainctl.data.quality.batches import Bool
from trainctl.data.quality.columns import Columns, ColumnWriter

CONTAMINATED, EXACT, NEAR, SUBSTRING = "contamination", "exact", "near", "substring"
EXAMPLES = 5
"""Number of example documents kept for each source and reason."""


@dataclass(frozen=True, slots=True)
class Contamination:
    """Rule that removes documents with passages of held-out texts."""

    min_ngrams: int = 1
    """Minimum number of held-out n-grams in a document that is removed."""
    max_documents: int | None = 10
    """An n-gram in more documents than this, copies not counted, is boilerplate and is ignored.
    None ignores none.
    """


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules that remove documents."""

    filters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of each source's filters: `{source: {filter: keys}}`."""
    contamination: Contamination | None = None
    """None disables decontamination."""
    exact: bool = True
    """Whether to remove copies of identical texts. They are always removed if `near` is set."""
    near: float | None = None
    """Minimum Jaccard index of near duplicates; None keeps them."""
    substring: float | None = None
    """Minimum share of words in passages of earlier documents for which a document is removed;
    None disables this.
    """


@dataclass(frozen=True, slots=True)
class Tally:
    """Numbers of documents that a reason removes from a source."""

    documents: int
    """Documents removed for this reason and for no earlier one."""
    characters: int
    applies: int
    """Documents that the reason applies to, including those removed for an earlier one."""


@dataclass(frozen=True, slots=True)
class Example:
    """A removed document."""

    source: str
    part: str
    number: int
    value: float | None = None
    """The number that decided: the filter's statistic, the number of held-out n-grams, the
    Jaccard index, or the share of words in shared passages. None if it is not finite.
    """
    like: tuple[str, str, int] | None = None
    """Source, part and number of the document that stays in its place."""
    word: int | None = None
    """First word of the first held-out passage (`contamination.passage`)."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Decision for every document of a corpus, with counts and examples."""

    why: npt.NDArray[np.uint8]
    """0 for a document that stays, else 1 + the index of the first reason, [documents]."""
    reasons: tuple[str, ...]
    """Names of the reasons in the order of application, like `gopher_quality.min_words`."""
    counts: Mapping[str, Mapping[str, Tally]]
    """`{source: {reason: Tally}}`, for reasons that apply to some document."""
    examples: Mapping[str, Mapping[str, tuple[Example, ...]]]
    """`{source: {reason: some of the documents removed for it}}`."""
    common_ngrams: int
    """Number of held-out n-grams that were ignored as boilerplate."""
    parts: tuple[tuple[str, str, int], ...]
    """Source, name and first id of each part."""

    @property
    def stays(self) -> Bool:
        """Mask of the documents that stay, [documents]."""
        stays: Bool = self.why == 0
        return stays

    def write(self, folder: Path, key: str) -> None:
        """Store the selection with a key of everything it depends on."""
        with ColumnWriter(folder, key) as writer:
            writer.append({"why": self.why})
            writer.finish(
                reasons=self.reasons,
                counts=to_plain(self.counts),
                examples=to_plain(self.examples),
                common_ngrams=self.common_ngrams,
                parts=self.parts,
            )

    @classmethod
    def load(cls, folder: Path) -> Selection:
        """Load what `write` stored."""
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
                source: {reason: tuple(map(example_from_json, some)) for reason, some in of.items()}
                for source, of in facts["examples"].items()
            },
            common_ngrams=facts["common_ngrams"],
            parts=tuple(map(tuple, facts["parts"])),
        )


def example_from_json(data: dict[str, Any]) -> Example:
    """Create an example from its JSON."""
    like = data["like"]
    return Example(**{**data, "like": tuple(like) if like is not None else None})
