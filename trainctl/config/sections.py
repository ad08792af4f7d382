"""Checks of whole sections: each has the keys of its kind only, also under names of the user's.

Files and overrides set the keys of a named section one by one (`data.sources.code.weight`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from pathlib import PurePath
from typing import Any

from trainctl.config.check import UNKNOWN_KEY, WRONG_VALUE, wrong_value
from trainctl.config.codec import from_plain
from trainctl.config.keys import (
    Leaf,
    ValueProblem,
    as_written,
    convert_value,
    keys_of,
    leaves,
    part_leaves,
    part_leaves_of,
)
from trainctl.config.layers import Stack
from trainctl.config.registry import (
    kind_key,
    kind_of,
    list_kinds,
    load_spec,
    load_specs,
    unit_groups,
)
from trainctl.config.schema import GROUPS, RunConfig
from trainctl.config.suggest import did_you_mean, join_alternatives, nearest_keys, nearest_names
from trainctl.errors import Finding, Severity

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
                    source=_source_of_key(stack, key),
                )
            elif isinstance(section, dict):
                yield from _complete_section(stack, leaf, key, section)


def _complete_section(
    stack: Stack, leaf: Leaf, key: str, section: dict[str, Any]
) -> Iterator[Finding]:
    part, known = leaf.part, part_leaves(leaf.part) if leaf.part else {}
    assert part is not None
    group = part.units  # type: ignore[attr-defined]
    choice = kind_key(group)
    kind = section.get(choice) or kind_of_paths(group, section) or kind_of(part)
    if not kind:  # the section's name is its kind
        kind, kinds = key.rpartition(".")[2], list_kinds(group)
        if kind not in kinds:
            near = did_you_mean([f"{key}.{choice}={one}" for one in nearest_names(kind, kinds)])
            yield Finding(
                rule=WRONG_VALUE,
                key=key,
                message=f"{key} has no {choice}, and {kind} is none",
                hint=near or f"{key}.{choice} is {join_alternatives(kinds)}",
                source=_source_of_key(stack, key),
            )
            section.clear()
            kind = kinds[0]
    section[choice] = kind
    own = part_leaves_of(part, kind)
    for name in [name for name in section if name not in own]:
        value, inside = section.pop(name), f"{key}.{name}"
        if name in known and value == known[name].default:
            continue  # a default left from another kind
        close = nearest_names(name, own)
        having = join_alternatives(known[name].kinds) if name in known else ""
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
            source=_source_of_key(stack, inside),
        )


def kind_of_paths(group: str, section: Mapping[str, Any]) -> str | None:
    """Return the kind that reads files with the first path's (longest matching) ending."""
    paths = [path for path in section.get("paths") or () if isinstance(path, str)]
    endings = {
        ending: spec.name
        for spec in load_specs(group)
        if not getattr(spec, "encoder", "")  # kinds of conversations must be named
        for ending in getattr(spec, "endings", ())
    }
    matching = [ending for ending in endings if paths and paths[0].endswith(ending)]
    return endings[max(matching, key=len)] if matching and endings else None


def _source_of_key(stack: Stack, key: str) -> str:
    """Return the place that set a key, or the section that contains it."""
    while key and key not in stack.layers:
        inside = [name for name in stack.layers if name.startswith(f"{key}.")]
        key = inside[0] if inside else key.rpartition(".")[0]
    return stack.layers[key][-1].source if key else ""


NO_EFFECT = "TC112"


def drop_foreign_keys(stack: Stack, typed: Set[str], recipe: str | None) -> Iterator[Finding]:
    """Reduce each section to the keys of its kind; keys that nothing set get the kind's defaults.

    A key of another kind is an unknown key. It is only a warning if it is a leftover: from a recipe
    that the chosen one extends, from the resumed run, or from a file whose kind the command line
    replaces.

    Args:
        stack: Settings with references resolved.
        recipe: The chosen recipe; None where a saved configuration is changed.
    """
    for group in unit_groups():
        section = stack.plain[group]
        choice = kind_key(group)
        kind = section[choice]
        own = keys_of(group, kind)
        for name in [name for name in section if name != choice]:
            key = f"{group}.{name}"
            value = section.pop(name)
            inside = _mapping_entries(stack, key)
            if not inside and not stack.is_set(key):
                continue
            source = stack.layers[inside[-1] if inside else key][-1].source
            if key not in own:
                is_typed = not typed.isdisjoint((key, *inside))
                if not is_typed and value == leaves()[key].default:
                    continue  # a file sets the default: nothing is lost
                is_left_over = not is_typed and (
                    recipe is None
                    or f"{group}.{choice}" in typed
                    or _is_extended_recipe(source, recipe)
                )
                yield _foreign_key_finding(key, value, kind, is_left_over).set_by(source)
            elif leaves()[key].kinds:
                yield from _set_checked(section, own[key], value, source)
            else:
                section[name] = value


def _mapping_entries(stack: Stack, key: str) -> list[str]:
    if not leaves()[key].is_mapping:
        return []
    return [each for each in stack.layers if each.startswith(f"{key}.")]


def _set_checked(section: dict[str, Any], leaf: Leaf, value: Any, source: str) -> Iterator[Finding]:
    """Set a key that not all kinds have, checked against the range that this kind gives it."""
    try:
        section[leaf.key.rpartition(".")[2]] = convert_value(leaf, value)
    except ValueProblem as problem:
        yield wrong_value(leaf.key, source, problem)


def _is_extended_recipe(source: str, recipe: str | None) -> bool:
    file = PurePath(source.rpartition(":")[0])
    return file.stem != recipe and file.parent.name not in GROUPS


def _foreign_key_finding(key: str, value: Any, kind: str, is_left_over: bool) -> Finding:
    group = key.partition(".")[0]
    kinds = leaves()[key].kinds
    if is_left_over:
        return Finding(
            rule=NO_EFFECT,
            key=key,
            message=f"{key}={as_written(value)} has no effect: it is a key of "
            f"{', '.join(kinds)}, and {group}.{kind_key(group)} is {kind}",
            hint=f"leave {key} out",
            severity=Severity.warning,
        )
    close = [near for near in nearest_keys(key, keys_of(group, kind), GROUPS) if near != key]
    return Finding(
        rule=UNKNOWN_KEY,
        key=key,
        message=f"there is no key {key} with {group}.{kind_key(group)}={kind}",
        hint=f"{did_you_mean(close)} {group}={join_alternatives(kinds)} has it".strip(),
    )


def callbacks_of(config: RunConfig) -> dict[str, Any]:
    """Return the callbacks of a run, in order, with their typed sections."""
    return {
        name: from_plain(load_spec("callbacks", name).keys, keys, f"callbacks.{name}")
        for name, keys in config.callbacks.items()
        if keys is not None
    }
