"""Blocklist of words: documents with too many listed words are dropped."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema.option import option
from trainctl.options.filter import Filter, FilterConfig, at_most


@dataclass
class WordsConfig(FilterConfig):
    """The word list, and the accepted number of its words."""

    file: str = option("", "Text file with one word per line; case is ignored.", example="bad.txt")
    max_words: int | None = option(0, "Maximum number of listed words in a document.", minimum=0)
    max_share: float | None = option(
        None, "Maximum fraction of a document's words that are in the list.", minimum=0, maximum=1
    )


SPEC = Filter(
    name="words",
    keys=WordsConfig,
    build="trainctl.data.quality.statistics:word_list",
    bounds=at_most(max_words="listed", max_share="listed_share"),
    settings=("file",),
)
