"""Data of other programs: files, URLs and datasets of the hub, as one source or a mixture."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainctl.migration.configs.import_table import Conversion
from trainctl.models.directory import is_hub_name
from trainctl.models.local_path import is_there

HUB = "hf://datasets/"
"""Protocol of the hub's datasets (docs/data.md)."""


FILE_ENDINGS = (".json", ".jsonl", ".parquet", ".arrow", ".csv", ".txt", ".gz", ".zst")
"""Endings that a file of data has, and a name on the hub has not."""


@dataclass
class DataPart:
    """One source of the data."""

    kind: str
    """Option of the group `data`."""
    paths: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    keys: dict[str, Any] = field(default_factory=dict)
    """Further keys of the kind."""


def place(source: Conversion, path: Any, files: Any = None, revision: Any = None) -> list[str]:
    """Return the paths or URLs of a dataset: a local file or folder, or a name on the hub.

    Args:
        files: Names of files in it; None means all of them.
        revision: Branch, tag or commit on the hub.
    """
    if not isinstance(path, str) or not path:
        return []
    names = [files] if isinstance(files, str) else files if isinstance(files, list) else []
    names = [str(each) for each in names if each]
    is_file = Path(path).suffix in FILE_ENDINGS
    is_local = is_file or is_there(source.locate(path)) or not is_hub_name(path)
    if path in ("json", "jsonl", "parquet", "text", "csv", "arrow") and names:
        return names  # a format of `datasets`, whose files are listed
    root = path if is_local or "://" in path else f"{HUB}{path}{f'@{revision}' if revision else ''}"
    return [join(root, name) for name in names] or [root]


def join(folder: str, name: str) -> str:
    """Return the path of a file in a folder, or its URL in a store; an absolute one stays."""
    return name if name.startswith("/") or "://" in name else f"{folder.rstrip('/')}/{name}"


def choose_data(source: Conversion, parts: list[DataPart], *, epochs: str) -> None:
    """Set the data: one source if all parts are of one kind, else a mixture of whole sources.

    Args:
        epochs: Key of the source with the number of passes, which a mixture has for each part.
    """
    if not parts:
        return
    first = parts[0]
    if all((part.kind, part.keys) == (first.kind, first.keys) for part in parts):
        source.set("data", first.kind)
        source.set("data.paths", [path for part in parts for path in part.paths])
        held_out = [path for part in parts for path in part.held_out]
        if held_out:
            source.set("data.held_out_paths", held_out)
        for name, value in first.keys.items():
            source.set(f"data.{name}", value)
        return
    passes = source.converted.settings.pop("training.epochs", None)
    if passes is not None:
        source.leave(epochs, "a mixture has passes of each source", "training.tokens=1B")
    share = {"weight": 1.0} if passes is None else {"epochs": passes}
    source.set("data", first.kind)
    source.set(
        "data.sources",
        {
            f"part_{number}": {
                "kind": part.kind,
                "paths": part.paths,
                **({"held_out_paths": part.held_out} if part.held_out else {}),
                **share,
                **part.keys,
            }
            for number, part in enumerate(parts, 1)
        },
    )
