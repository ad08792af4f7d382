"""Gopher's repetition rules (Rae et al., 2021, A.1.1 and table A1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainctl.config.schema.option import option
from trainctl.options.filter import Filter, FilterConfig, at_most


def _share(default: float, of: str) -> Any:
    return option(default, f"Largest share of {of}.", minimum=0, maximum=1)


@dataclass
class GopherRepetitionConfig(FilterConfig):
    """Thresholds of Gopher's repetition rules: largest shares."""

    lines: float | None = _share(0.3, "lines that the document has already")
    paragraphs: float | None = _share(0.3, "paragraphs that it has already")
    line_characters: float | None = _share(0.2, "characters in such lines")
    paragraph_characters: float | None = _share(0.2, "characters in such paragraphs")
    top_2grams: float | None = _share(0.2, "characters in the 2-gram that has most")
    top_3grams: float | None = _share(0.18, "characters in the 3-gram that has most")
    top_4grams: float | None = _share(0.16, "characters in the 4-gram that has most")
    repeated_5grams: float | None = _share(0.15, "characters in 5-grams that it has already")
    repeated_6grams: float | None = _share(0.14, "characters in 6-grams that it has already")
    repeated_7grams: float | None = _share(0.13, "characters in 7-grams that it has already")
    repeated_8grams: float | None = _share(0.12, "characters in 8-grams that it has already")
    repeated_9grams: float | None = _share(0.11, "characters in 9-grams that it has already")
    repeated_10grams: float | None = _share(0.1, "characters in 10-grams that it has already")


SPEC = Filter(
    name="gopher_repetition",
    keys=GopherRepetitionConfig,
    build="trainctl.data.quality.statistics:gopher_repetition_statistics",
    bounds=at_most(
        lines="repeated_lines",
        paragraphs="repeated_paragraphs",
        line_characters="repeated_lines_characters",
        paragraph_characters="repeated_paragraphs_characters",
        **{f"top_{size}grams": f"top_{size}gram_characters" for size in (2, 3, 4)},
        **{f"repeated_{size}grams": f"repeated_{size}gram_characters" for size in range(5, 11)},
    ),
)
