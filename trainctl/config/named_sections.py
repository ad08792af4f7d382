"""Sections of which there are several, by names that the user gives, such as `data.sources`.

Each is of a kind of its group and has that kind's keys. What files and overrides set in them are
keys of their own (`data.sources.code.weight`); here each section is looked at as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainctl.config.check import UNKNOWN_KEY, WRONG_VALUE
from trainctl.config.keys import Leaf, leaves, part_leaves, part_leaves_of
from trainctl.config.layers import Stack
from trainctl.config.registry import chooser, kind_of, specs
from trainctl.config.suggest import did_you_mean, nearest, one_of
from trainctl.errors import Finding

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


def complete_parts(stack: Stack) -> Iterator[Finding]:
    """Give each such section its kind, and leave it with the keys of that kind.

    Args:
        stack: What was set, references resolved.
    """
    for leaf in [leaf for leaf in leaves().values() if leaf.part is not None]:
        group, _, mapping = leaf.key.partition(".")
        for name, section in stack.plain[group].get(mapping, {}).items():
            key = f"{leaf.key}.{name}"
            if not NAME.fullmatch(name):
                yield Finding(
                    rule=WRONG_VALUE,
                    key=key,
                    message=f"{name!r} is no name: letters, digits, _ and - are",
                    source=_source(stack, key),
                )
            elif isinstance(section, dict):
                yield from _complete(stack, leaf, key, section)


def _complete(stack: Stack, leaf: Leaf, key: str, section: dict[str, Any]) -> Iterator[Finding]:
    part, known = leaf.part, part_leaves(leaf.part) if leaf.part else {}
    assert part is not None
    group = part.units  # type: ignore[attr-defined]
    choice = chooser(group)
    kind = section.setdefault(choice, kind_of_paths(group, section) or kind_of(part))
    own = part_leaves_of(part, kind)
    for name in [name for name in section if name not in own]:
        value, inside = section.pop(name), f"{key}.{name}"
        if name in known and value == known[name].default:
            continue  # that came with what had another kind before
        close = nearest(name, own)
        having = one_of(known[name].kinds) if name in known else ""
        yield Finding(
            rule=UNKNOWN_KEY,
            key=inside,
            message=f"there is no key {inside} with {key}.{choice}={kind}",
            hint=" ".join(
                each
                for each in (
                    did_you_mean([f"{key}.{one}" for one in close]),
                    f"only with {choice}: {having}" if having else "",
                )
                if each
            ),
            source=_source(stack, inside),
        )


def kind_of_paths(group: str, section: Mapping[str, Any]) -> str | None:
    """Return the kind that reads files of the first path's ending, the longest such ending
    first."""
    paths = [path for path in section.get("paths") or () if isinstance(path, str)]
    endings = {
        ending: spec.name
        for spec in specs(group)
        if not getattr(spec, "encoder", "")  # a kind of conversations has to be named
        for ending in getattr(spec, "endings", ())
    }
    matching = [ending for ending in endings if paths and paths[0].endswith(ending)]
    return endings[max(matching, key=len)] if matching and endings else None


def _source(stack: Stack, key: str) -> str:
    """What set a key, or the section that it is in."""
    while key and key not in stack.layers:
        inside = [name for name in stack.layers if name.startswith(f"{key}.")]
        key = inside[0] if inside else key.rpartition(".")[0]
    return stack.layers[key][-1].source if key else ""
