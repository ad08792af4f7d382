"""Blocklist of addresses: documents from a listed host, or below a listed path, are dropped."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema.option import option
from trainctl.options.filter import Filter, FilterConfig, at_most


@dataclass
class UrlsConfig(FilterConfig):
    """Keys of the address blocklist."""

    file: str = option(
        "",
        "Text file with one blocked entry per line: a host (with its subdomains) or a URL prefix.",
        example="blocked.txt",
    )
    max_matches: int | None = option(
        0, "Maximum number of entries that a document's URL may match.", minimum=0
    )


SPEC = Filter(
    name="urls",
    keys=UrlsConfig,
    build="trainctl.data.quality.statistics:url_list",
    bounds=at_most(max_matches="matches"),
    settings=("file",),
)
