"""FineWeb's own rules (Penedo et al., 2024, section 3.6), with their thresholds."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema.option import option
from trainctl.options.filter import Filter, FilterConfig, at_least, at_most


@dataclass
class FineWebConfig(FilterConfig):
    """Thresholds of FineWeb's rules."""

    min_terminated_lines: float | None = option(
        0.12, "Minimum fraction of lines that end with terminal punctuation.", minimum=0, maximum=1
    )
    max_short_lines: float | None = option(
        0.67, "Maximum fraction of lines shorter than 30 characters.", minimum=0, maximum=1
    )
    max_repeated_lines: float | None = option(
        0.1,
        "Maximum fraction of characters in repeated lines; FineWeb's paper has 0.1, its code 0.01.",
        minimum=0,
        maximum=1,
    )
    max_lines_per_word: float | None = option(
        0.3, "Maximum ratio of line feeds to words.", minimum=0
    )


SPEC = Filter(
    name="fineweb",
    keys=FineWebConfig,
    build="trainctl.data.quality.statistics:fineweb_statistics",
    bounds=at_least(min_terminated_lines="terminated_lines")
    + at_most(
        max_short_lines="short_lines",
        max_repeated_lines="repeated_lines_characters",
        max_lines_per_word="lines_per_word",
    ),
)
