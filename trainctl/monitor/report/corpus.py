"""Chart of the documents of a run's sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from trainctl.data.statistics import SourceStatistics


def chart(found: Mapping[str, SourceStatistics], title: str) -> Figure:
    """Draw document lengths of each source, and below them its tokens and copies."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 5), layout="constrained")
    lengths, sizes = figure.subplots(2, 1, height_ratios=(3, 2))
    for name, source in found.items():
        share = [count / max(1, source.documents) for count in source.lengths.values()]
        lengths.plot(list(source.lengths), share, marker="o", markersize=3, label=name)
    lengths.set_xscale("log", base=2)
    lengths.set_xlabel("tokens of a document, at most")
    lengths.set_ylabel("share of the documents")
    lengths.set_ylim(bottom=0)
    lengths.set_title(title)
    lengths.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    names = list(found)
    sizes.barh(names, [source.tokens for source in found.values()], height=0.6, alpha=0.35)
    for number, source in enumerate(found.values()):
        copies = f", {source.copies / max(1, source.documents):.1%} copies" if source.copies else ""
        sizes.annotate(
            f" {source.tokens:,} tokens of {source.documents:,} documents{copies}",
            (0, number),
            va="center",
        )
    sizes.invert_yaxis()
    sizes.set_xlabel("tokens")
    sizes.xaxis.set_major_formatter(EngFormatter(sep=""))
    sizes.grid(visible=False, axis="y")
    return figure
