"""C4's rules for documents (Raffel et al., 2020, section 2.2), without its removal of lines."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema.option import option
from trainctl.options.filter import Filter, FilterConfig, at_least, at_most


@dataclass
class C4Config(FilterConfig):
    """Thresholds of C4's rules."""

    min_sentences: int | None = option(5, "Fewest sentences of a document.", minimum=0)
    min_lines: float | None = option(
        None,
        "Smallest share of lines that C4 would keep: of three words, ended as a sentence is, "
        "without javascript, cookies and the like.",
        minimum=0,
        maximum=1,
    )
    max_curly_brackets: int | None = option(0, "Most opening curly brackets.", minimum=0)
    max_lorem_ipsum: int | None = option(0, "How often it has «lorem ipsum».", minimum=0)


SPEC = Filter(
    name="c4",
    keys=C4Config,
    build="trainctl.data.quality.statistics:c4",
    bounds=at_least(min_sentences="sentences", min_lines="c4_lines")
    + at_most(max_curly_brackets="curly_brackets", max_lorem_ipsum="lorem_ipsum"),
)
