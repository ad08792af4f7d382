"""Text and JSONL files, compressed or not."""

from __future__ import annotations

from trainctl.config.schema import DataFromRecords
from trainctl.config.text import plain
from trainctl.options.data import DataSource

SPEC = DataSource(
    name="files",
    keys=DataFromRecords,
    build="trainctl.config.text.plain:read",
    endings=(".jsonl", ".md", ".txt"),
    ranges=plain.ranges,
    counts_lines=True,
    problem=plain.problem,
    is_plain=True,
    places=plain.places,
    identity=lambda section: section.text_key,
)
