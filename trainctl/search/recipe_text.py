"""Text of a recipe: its base, the options it chooses and the keys it sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json import dumps
from typing import Any


def recipe_text(
    comment: Sequence[str], base: str, choices: Mapping[str, str], settings: Mapping[str, Any]
) -> str:
    """Return the recipe as YAML.

    Args:
        comment: Lines of the comment on top.
        base: Recipe to start from, or `base`.
        choices: Options by group, where they differ from the base.
        settings: Plain values by dotted key.
    """
    lines = [f"# {line}" for line in comment] + ["defaults:", f"  - {base}"]
    lines += [f"  - override /{group}: {dumps(option)}" for group, option in choices.items()]
    lines.append("  - _self_")
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        *parents, name = key.split(".")
        level = nested
        for parent in parents:
            level = level.setdefault(parent, {})
        level[name] = value
    return "\n".join([*lines, *_yaml(nested, "")])


def _yaml(level: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    for name, value in level.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{name}:", *_yaml(value, f"{indent}  ")]
        else:
            lines.append(f"{indent}{name}: {dumps(value)}")
    return lines
