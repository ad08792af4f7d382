"""A corpus that `trainctl data prepare --to` wrote elsewhere, read through a local cache folder."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import DataConfig
from trainctl.config.schema.option import option
from trainctl.options.data import DataSource


@dataclass
class StreamConfig(DataConfig):
    """Keys of a streamed corpus."""

    url: str | None = option(
        None, "URL or folder that `trainctl data prepare --to` wrote the corpus to; required."
    )
    cache_bytes: int = option(
        1 << 36,
        "Maximum size of the corpus cached on a node: at least two windows of shards and one "
        "held-out window.",
        unit="bytes",
        minimum=1,
    )
    cache_folder: str | None = option(
        None, "Cache folder, on a local disk of each node; none is TRAINCTL_CACHE_DIR."
    )
    shuffle_shards: int | None = option(
        None,
        "Shuffle window, in shards of 64 Mi tokens; none shuffles the whole corpus, for which "
        "the cache must have room.",
        unit="shards",
        minimum=1,
    )


def shards_needed(shuffle_shards: int | None, *, shuffle: bool) -> int | None:
    """Return the number of training shards that must be in the cache at a time; None means all.

    Shuffling needs two windows: one is read while the next is fetched. Without shuffling a rank
    reads one shard, or crosses the border of two.
    """
    if not shuffle:
        return 4
    return None if shuffle_shards is None else 2 * shuffle_shards


SPEC = DataSource(
    name="stream",
    keys=StreamConfig,
    build="trainctl.data.streaming.corpora:open_streamed_corpus",
    files=lambda section: [],
    identity=lambda section: str(section.url),
    is_prepared=True,
    begins_texts=False,
)
