"""Data-quality settings of a configuration: filters, deduplication, decontamination.

All are derived from the sections of `data`; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from trainctl.config.codec import from_plain
from trainctl.config.registry import load_spec, new_section
from trainctl.config.schema import DEDUP_THRESHOLDS, DataConfig, DataFromRecords
from trainctl.config.sections import kind_of_paths
from trainctl.config.user_code import find_module
from trainctl.errors import TrainctlError
from trainctl.models.local_path import local_path

HELD_OUT = "held_out"
"""Entry of `data.decontaminate` for the run's own held-out documents."""


def threshold_of(whole: DataConfig) -> float | None:
    """Return the similarity from which a document is dropped; None if there is none."""
    if whole.dedup_threshold is not None and whole.dedup in DEDUP_THRESHOLDS:
        return whole.dedup_threshold
    return DEDUP_THRESHOLDS.get(whole.dedup)


def precedence_of(whole: DataConfig) -> list[str]:
    """Return all sources by name; of copies, the document in the earlier source is kept."""
    return list(dict.fromkeys([*whole.dedup_precedence, *whole.sources]))


def filters_of(section: DataConfig) -> dict[str, Any]:
    """Return the filters of a source with their typed sections: `{name: FilterConfig}`."""
    filters: Mapping[str, Any] = section.filters
    return {
        name: from_plain(load_spec("filter", name).keys, keys, f"filters.{name}")
        for name, keys in filters.items()
        if keys is not None
    }


def filter_digests(section: DataConfig) -> list[str]:
    """Return a digest of each list and function of a source's filters, by filter name.

    For a function it is the digest of its module's file; modules that it imports are not included.

    Raises:
        TrainctlError: A list cannot be read.
    """
    found = []
    for name, keys in sorted(filters_of(section).items()):
        for setting in load_spec("filter", name).settings:
            value = getattr(keys, setting)
            file = local_path(value) if setting == "file" else None
            if setting == "call":
                module = find_module(value.partition(":")[0], Path.cwd())
                file = module if isinstance(module, Path) else None
            if file is not None:
                found.append(f"{name} {_file_digest(file)}")
    return found


def decontamination_sections(whole: DataConfig) -> Iterator[DataConfig]:
    """Yield, for each path of `data.decontaminate`, a section that reads it.

    The section's kind is chosen by the file's ending; its text key is the run's.
    """
    for path in whole.decontaminate:
        if path != HELD_OUT:
            kind = kind_of_paths("data", {"paths": [path]}) or "files"
            section = new_section("data", kind, held_out_fraction=0.0)
            section.paths = [path]
            section.on_bad_text = whole.on_bad_text
            if isinstance(section, DataFromRecords) and isinstance(whole, DataFromRecords):
                section.text_key = whole.text_key
            yield section


def _file_digest(file: Path) -> str:
    try:
        return sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise TrainctlError(
            f"cannot read {file}: {error.strerror}", hint="name a text file"
        ) from None
