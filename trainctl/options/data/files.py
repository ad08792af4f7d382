"""Text and JSONL files, compressed or not."""

from __future__ import annotations

from trainctl.config.schema import DataFromRecords
from trainctl.options.data import DataSource
from trainctl.readers import plain

SPEC = DataSource(
    name="files",
    keys=DataFromRecords,
    build="trainctl.readers.plain:read",
    endings=(".jsonl", ".md", ".txt"),
    ranges=plain.ranges,
    counts_lines=True,
    problem=plain.problem,
    is_plain=True,
    places=plain.line_numbers,
    identity=lambda section: section.text_key,
)
