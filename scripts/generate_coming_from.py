"""Write the tables of keys in docs/coming-from.md from the tables of other programs' keys.

The page has the keys that a table's `shown` lists; `--check` only compares. The site has the whole
tables on the page imported-keys, which `whole_tables` writes while the site is built.
"""

from __future__ import annotations

import sys
from pathlib import Path

from page_tables import replace_part, table

from trainctl.config.schema import GROUPS
from trainctl.migration.configs.tables import KeyTable, TableEntry, load_table, tool_names

PAGE = Path(__file__).parents[1] / "docs" / "coming-from.md"


def marks(tool: str) -> tuple[str, str]:
    """Return the comments that enclose a program's table on the page."""
    return f"<!-- keys of {tool}, by `make docs` -->", f"<!-- end of {tool} -->"


def key_table(found: KeyTable, names: list[str] | None = None) -> str:
    """Return a program's keys as a Markdown table, all of them if none are named."""
    rows = [(f"`{name}`", _meaning(found.keys[name])) for name in names or found.keys]
    return table(["there", "here"], rows)


def _meaning(entry: TableEntry) -> str:
    if entry.same_as:
        return f"as `{entry.same_as}`"
    if entry.ignored:
        return f"no effect: {entry.ignored}"
    if entry.left and not (entry.convert or entry.key):
        return f"left out: {entry.left}{_nearest(entry)}"
    targets = [entry.key] if entry.key else list(entry.to)
    text = ", ".join(f"`{each}=…`" if each in GROUPS else f"`{each}`" for each in targets)
    default = f"; default there: `{_plain(entry.default)}`"
    return text + (default if entry.default is not None else "")


def _nearest(entry: TableEntry) -> str:
    if not entry.nearest:
        return ""
    is_code = "=" in entry.nearest and " " not in entry.nearest
    is_code = is_code or (entry.nearest.startswith("trainctl ") and "," not in entry.nearest)
    return f"; nearest: `{entry.nearest}`" if is_code else f"; nearest: {entry.nearest}"


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def whole_tables() -> str:
    """Return the tables of all programs, with all of their keys, as Markdown."""
    tables = (load_table(tool) for tool in tool_names())
    parts = (f"## {found.name}\n{found.source}.\n\n{key_table(found)}" for found in tables)
    return "\n\n".join(part.replace("\\", "\\\\") for part in parts)


def main(arguments: list[str]) -> int:
    """Write the page, or with `--check` report whether it is up to date."""
    before = PAGE.read_text(encoding="utf-8")
    for tool in tool_names():
        if load_table(tool).shown:
            replace_part(
                PAGE, marks(tool), key_table(load_table(tool), list(load_table(tool).shown))
            )
    after = PAGE.read_text(encoding="utf-8")
    if "--check" in arguments and after != before:
        PAGE.write_text(before, encoding="utf-8")
        print("docs/coming-from.md is out of date: run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
