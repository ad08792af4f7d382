"""C4's rules for documents (Raffel et al., 2020, section 2.2), without its removal of lines."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema.option import option
from trainctl.options.filter import Filter, FilterConfig, at_least, at_most


@dataclass
class C4Config(FilterConfig):
    """Thresholds of C4's rules."""

    min_sentences: int | None = option(5, "Minimum number of sentences in a document.", minimum=0)
    min_lines: float | None = option(
        None,
        "Minimum fraction of lines that C4 would keep: at least three words, terminal "
        "punctuation, and no javascript, cookie notice and the like.",
        minimum=0,
        maximum=1,
    )
    max_curly_brackets: int | None = option(
        0, "Maximum number of opening curly brackets.", minimum=0
    )
    max_lorem_ipsum: int | None = option(
        0, "Maximum number of occurrences of «lorem ipsum».", minimum=0
    )


SPEC = Filter(
    name="c4",
    keys=C4Config,
    build="trainctl.data.quality.statistics:c4_statistics",
    bounds=at_least(min_sentences="sentences", min_lines="c4_lines")
    + at_most(max_curly_brackets="curly_brackets", max_lorem_ipsum="lorem_ipsum"),
)
