"""Gopher's quality rules for prose (Rae et al., 2021, A.1.1). They drop nearly all code."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema.option import option
from trainctl.options.filter import Filter, FilterConfig, at_least, at_most


@dataclass
class GopherQualityConfig(FilterConfig):
    """Thresholds of Gopher's quality rules; words are separated by white space."""

    min_words: int | None = option(50, "Minimum number of words in a document.", minimum=0)
    max_words: int | None = option(100_000, "Maximum number of words in a document.", minimum=1)
    min_mean_word_length: float | None = option(
        3.0, "Minimum mean word length.", unit="characters", minimum=0
    )
    max_mean_word_length: float | None = option(
        10.0, "Maximum mean word length.", unit="characters", above=0
    )
    max_hashes: float | None = option(0.1, "Maximum ratio of hash signs (#) to words.", minimum=0)
    max_ellipses: float | None = option(0.1, "Maximum ratio of ellipses to words.", minimum=0)
    max_bullet_lines: float | None = option(
        0.9, "Maximum fraction of lines that begin with a bullet point.", minimum=0, maximum=1
    )
    max_ellipsis_lines: float | None = option(
        0.3, "Maximum fraction of lines that end with an ellipsis.", minimum=0, maximum=1
    )
    min_words_with_letters: float | None = option(
        0.8, "Minimum fraction of words that contain a letter.", minimum=0, maximum=1
    )
    min_stop_words: int | None = option(
        2,
        "Minimum number of distinct stop words among the, be, to, of, and, that, have, with.",
        minimum=0,
        maximum=8,
    )


SPEC = Filter(
    name="gopher_quality",
    keys=GopherQualityConfig,
    build="trainctl.data.quality.statistics:gopher_quality_statistics",
    bounds=at_least(
        min_words="words",
        min_mean_word_length="mean_word_length",
        min_words_with_letters="words_with_letters",
        min_stop_words="stop_words",
    )
    + at_most(
        max_words="words",
        max_mean_word_length="mean_word_length",
        max_hashes="hashes_per_word",
        max_ellipses="ellipses_per_word",
        max_bullet_lines="bullet_lines",
        max_ellipsis_lines="ellipsis_lines",
    ),
)
