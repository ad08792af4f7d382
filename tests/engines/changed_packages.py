"""Packages that are another version by one definition: a folder to put before the real one."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def change(folder: Path, module: str, old: str, new: str) -> None:
    """Make a copy of a package in which `old` is `new` in one module; other files are links.

    `folder` has to precede the installed packages on the path. `old` must occur once.
    """
    package, *parts = module.split(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    source, target = Path(spec.origin).parent, folder / package
    for part in (*parts[:-1], f"{parts[-1]}.py"):
        target.mkdir(parents=True)
        for entry in source.iterdir():
            if entry.name not in (part, "__pycache__"):
                (target / entry.name).symlink_to(entry)
        source, target = source / part, target / part
    text = source.read_text()
    assert text.count(old) == 1
    target.write_text(text.replace(old, new))
