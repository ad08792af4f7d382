"""Sections under names that the user gives, such as `data.sources.NAME`.

Each is of a kind of its group and has the keys of that kind. Files and overrides set their keys one
by one (`data.sources.code.weight`); this module checks each section as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainctl.config.check import UNKNOWN_KEY, WRONG_VALUE
from trainctl.config.keys import Leaf, leaves, part_leaves, part_leaves_of
from trainctl.config.layers import Stack
from trainctl.config.registry import kind_key, kind_of, specs
from trainctl.config.suggest import did_you_mean, nearest, one_of
from trainctl.errors import Finding

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


def complete_named_sections(stack: Stack) -> Iterator[Finding]:
    """Set the kind of each named section, and remove the keys that its kind does not have.

    Yields a finding for each wrong name and unknown key. References must be resolved before.
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
    choice = kind_key(group)
    kind = section.setdefault(choice, kind_of_paths(group, section) or kind_of(part))
    own = part_leaves_of(part, kind)
    for name in [name for name in section if name not in own]:
        value, inside = section.pop(name), f"{key}.{name}"
        if name in known and value == known[name].default:
            continue  # a default left from another kind
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
    """Return the kind that reads files with the first path's (longest matching) ending."""
    paths = [path for path in section.get("paths") or () if isinstance(path, str)]
    endings = {
        ending: spec.name
        for spec in specs(group)
        if not getattr(spec, "encoder", "")  # kinds of conversations must be named
        for ending in getattr(spec, "endings", ())
    }
    matching = [ending for ending in endings if paths and paths[0].endswith(ending)]
    return endings[max(matching, key=len)] if matching and endings else None


def _source(stack: Stack, key: str) -> str:
    """Return the place that set a key, or the section that contains it."""
    while key and key not in stack.layers:
        inside = [name for name in stack.layers if name.startswith(f"{key}.")]
        key = inside[0] if inside else key.rpartition(".")[0]
    return stack.layers[key][-1].source if key else ""
