"""Write docs/reference.md from the schema and the shipped options; `--check` only compares."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from trainctl.config.catalog import list_options
from trainctl.config.keys import Leaf, leaves, option_leaves, part_leaves
from trainctl.config.registry import list_kinds
from trainctl.config.schema import GROUPS, RunConfig

TARGET = Path(__file__).parents[1] / "docs" / "reference.md"
INTRODUCTION = """\
# Configuration reference
Written by `make docs` from `trainctl/config/schema/` and `conf/`; do not edit it by hand.

A key is set as `group.key=value` on the command line or in a recipe; an option of a group is chosen
as `group=option`. Without a default (`null`) the value is derived: `trainctl config why KEY` gives
the value and the reason.
"""


def reference() -> str:
    """Return the whole page as Markdown."""
    parts = [INTRODUCTION]
    hints = get_type_hints(RunConfig)
    sections = [item for item in fields(RunConfig) if is_dataclass(hints[item.name])]
    for item in sections:
        parts.append("\n".join(_section(item.name, hints[item.name])) + "\n")
    parts.append("\n".join(_callbacks()) + "\n")
    top = [leaf for leaf in leaves().values() if "." not in leaf.key]
    parts.append("\n".join(["## Top level", "", *_table(top)]) + "\n")
    return "\n".join(parts)


def _section(name: str, cls: type) -> Iterator[str]:
    yield f"## {name}"
    yield (cls.__doc__ or "").strip()
    if name in GROUPS:
        yield ""
        yield "| option | what it is |"
        yield "|---|---|"
        for info in list_options(name):
            if not info.is_users:
                yield f"| `{name}={info.name}` | {_cell(info.summary)} |"
    yield ""
    keys = [leaf for leaf in leaves().values() if leaf.key.startswith(f"{name}.")]
    yield from _table(keys)
    for leaf in keys:
        if leaf.part is not None:
            yield ""
            yield f"### {leaf.key}.NAME"
            yield f"{(leaf.part.__doc__ or '').strip().splitlines()[0]} Its own:"
            yield ""
            part, group = part_leaves(leaf.part), leaf.part.units
            own = [item.name for item in fields(leaf.part)]
            names = own if group in GROUPS else [*part]  # other groups have no section above
            yield from _table(
                [
                    replace(
                        part[each],
                        key=f"{leaf.key}.NAME.{each}",
                        kinds=() if each in own else part[each].kinds,
                    )
                    for each in names
                ],
                group,
            )
        for name in option_names(leaf.metadata.get("each", "")):
            yield from _option_section(f"{leaf.key}.{name}", leaf.metadata["each"], name)


def _callbacks() -> Iterator[str]:
    """Yield the section of the shipped callbacks, whose keys are no fields of `RunConfig`."""
    yield "## callbacks"
    yield "Callbacks of the training loop: `callbacks=[NAME,...]` ([write one](callbacks.md))."
    yield ""
    yield "| option | what it is |"
    yield "|---|---|"
    for info in list_options("callbacks"):
        if not info.is_users:
            yield f"| `{info.name}` | {_cell(info.summary)} |"
    for name in option_names("callbacks"):
        yield from _option_section(f"callbacks.{name}", "callbacks", name)


def _option_section(key: str, group: str, name: str) -> Iterator[str]:
    """Yield the keys of one option, whose section is named `key`."""
    yield ""
    yield f"### {key}"
    yield ""
    own = option_leaves(group, name)
    yield from _table([replace(own[each], key=f"{key}.{each}") for each in own])


def option_names(group: str) -> tuple[str, ...]:
    """Return the options that have sections with this key; empty for most keys."""
    return list_kinds(group) if group else ()


def _table(leaves: list[Leaf], group: str = "") -> Iterator[str]:
    """Yield the rows of keys; `group` is that of their kinds, if the keys do not begin with it."""
    yield "| key | values | default | meaning |"
    yield "|---|---|---|---|"
    for leaf in leaves:
        meaning = _cell(leaf.metadata["doc"])
        meaning += _kinds(leaf, group)
        default = "" if leaf.default is None else f"`{_literal(leaf.default)}`"
        yield f"| `{leaf.key}` | {_cell(_values(leaf))} | {default} | {meaning} |"


def _kinds(leaf: Leaf, group: str) -> str:
    """List the kinds of the group that have the key, or those that lack it, whichever list is
    shorter.

    `none` is not listed among the kinds that lack it.
    """
    if not leaf.kinds:
        return ""
    group = group or leaf.key.partition(".")[0]
    others = [kind for kind in list_kinds(group) if kind not in leaf.kinds]
    if others == ["none"]:
        return ""
    has_most = len(others) < len(leaf.kinds)
    listed = ", ".join(f"`{kind}`" for kind in (others if has_most else leaf.kinds))
    return f" {'Not of' if has_most else 'Of'} {listed}."


def _values(leaf: Leaf) -> str:
    """Format type, range and unit, such as ``integer ≥ 1, tokens``."""
    if leaf.choices:
        choices = ", ".join(f"`{choice}`" for choice in leaf.choices)
        return f"list of {choices}" if get_origin(leaf.hint) is list else choices
    hint, metadata = leaf.hint, leaf.metadata
    inner = next((each for each in get_args(hint) if each is not type(None)), hint)
    names = {int: "integer", float: "number", bool: "true, false", str: "text"}
    origin = getattr(hint, "__origin__", None)
    kind = {list: "list", dict: "mapping"}.get(origin) or names[inner]
    unit = metadata["unit"]
    return ", ".join([f"{kind} {_range(metadata)}".strip(), *([unit] if unit else [])])


def _range(metadata: Mapping[str, Any]) -> str:
    """Format the range of a number, such as ``1 to 100`` or ``> 0, ≤ 1``."""
    least, above, most = (metadata[name] for name in ("minimum", "above", "maximum"))
    if least is not None and most is not None:
        return f"{least} to {most}"
    signs = (("≥", least), (">", above), ("≤", most))
    return ", ".join(f"{sign} {bound}" for sign, bound in signs if bound is not None)


def _literal(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main(arguments: list[str]) -> int:
    """Write the page, or with `--check` report whether it is up to date."""
    page = reference()
    if "--check" not in arguments:
        TARGET.write_text(page, encoding="utf-8")
        return 0
    if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == page:
        return 0
    print("docs/reference.md is out of date: run `make docs`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
