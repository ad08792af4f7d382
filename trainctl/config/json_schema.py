"""JSON Schemas (draft 2020-12) of recipes and options, for editors.

They help while typing and accept everything that `trainctl validate` accepts: a reference such as
``${training.steps}`` may replace any value, and the options of a group are suggestions.

In a user's folder they are files that an editor finds by the first line of a YAML file: the YAML
language server (VS Code's YAML extension, and others) reads a comment that names a schema, relative
to the YAML file. `DIR/.trainctl/` has one schema of recipes, and one of each group of options that
the folder has. They list the options of the folder as it was when they were written.
"""

from __future__ import annotations

import json
import os
import types
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from trainctl.config.catalog import list_options, list_recipes
from trainctl.config.keys import Leaf, leaves, option_leaves, part_leaves
from trainctl.config.quantities import suffix_pattern
from trainctl.config.registry import kind_key, list_kinds
from trainctl.config.schema import GROUPS, LIST_GROUPS, RunConfig
from trainctl.config.suggest import did_you_mean, nearest_names
from trainctl.config.yaml_files import SCHEMA_COMMENT
from trainctl.errors import TrainctlError

DIALECT = "https://json-schema.org/draft/2020-12/schema"
REFERENCE = {"type": "string", "pattern": r"\$\{"}
SET_BY_LAUNCH = ("recipe",)
"""Keys that a recipe cannot set."""


def recipe_schema(config_dir: Path | None = None) -> dict[str, Any]:
    """Return the schema of a recipe: what it extends, the options it chooses, the keys it sets.

    Args:
        config_dir: The user's folder, whose recipes and options it lists too.
    """
    hints = get_type_hints(RunConfig)
    properties: dict[str, Any] = {"defaults": _defaults_list_schema(config_dir)}
    for item in fields(RunConfig):
        if item.name in SET_BY_LAUNCH:
            continue
        if is_dataclass(hints[item.name]):
            properties[item.name] = _section_schema(item.name)
        else:
            properties[item.name] = value_schema(leaves()[item.name])
    return {
        "$schema": DIALECT,
        "title": "A recipe of trainctl",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def option_schema(group: str) -> dict[str, Any]:
    """Return the schema of an option of a group: the keys of its section.

    Raises:
        TrainctlError: There is no such group.
    """
    if group in LIST_GROUPS:
        each = [
            {"title": name, **_option_section_schema(group, name)} for name in list_kinds(group)
        ]
        return {"$schema": DIALECT, "title": f"An option of {group}", "anyOf": [*each, {}]}
    if group not in GROUPS:
        close = did_you_mean(nearest_names(group, (*GROUPS, *LIST_GROUPS)))
        hint = f"{close} groups: {', '.join((*GROUPS, *LIST_GROUPS))}".strip()
        raise TrainctlError(f"there is no group {group}", hint=hint)
    return {"$schema": DIALECT, "title": f"An option of {group}", **_section_schema(group)}


def value_schema(leaf: Leaf) -> dict[str, Any]:
    """Return the schema of one key: type, range, default and documentation."""
    unit = f" Unit: {leaf.metadata['unit']}." if leaf.metadata.get("unit") else ""
    return {
        "description": f"{leaf.metadata['doc']}{unit}",
        "default": leaf.default,
        "anyOf": [*json_types(leaf), REFERENCE],
    }


def _section_schema(name: str) -> dict[str, Any]:
    cls = get_type_hints(RunConfig)[name]
    keys = [leaf for leaf in leaves().values() if leaf.key.startswith(f"{name}.")]
    return {
        "description": (cls.__doc__ or "").strip(),
        "type": "object",
        "properties": _property_schemas(keys, f"{name}."),
        "additionalProperties": False,
        **({"allOf": _schemas_by_kind(name, keys)} if any(leaf.kinds for leaf in keys) else {}),
    }


def _property_schemas(keys: list[Leaf], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for leaf in keys:
        name, dot, _ = leaf.key.removeprefix(prefix).partition(".")
        if not dot:
            found[name] = value_schema(leaf)
        elif name not in found:
            inside = f"{prefix}{name}."
            found[name] = {
                "type": "object",
                "properties": _property_schemas(
                    [k for k in keys if k.key.startswith(inside)], inside
                ),
                "additionalProperties": False,
            }
    return found


def _schemas_by_kind(group: str, keys: list[Leaf]) -> list[dict[str, Any]]:
    """Return conditions that forbid the keys of other kinds, if the file names its kind."""
    key = kind_key(group)
    return [
        {
            "if": {"properties": {key: {"const": kind}}, "required": [key]},
            "then": {
                "properties": {
                    leaf.key.partition(".")[2]: False
                    for leaf in keys
                    if leaf.kinds and kind not in leaf.kinds
                }
            },
        }
        for kind in list_kinds(group)
    ]


def json_types(leaf: Leaf) -> list[dict[str, Any]]:
    """Return the JSON Schema types of a key's values."""
    if leaf.metadata.get("units"):
        choice = {"enum": list(leaf.choices)}
        is_list = get_origin(leaf.hint) is list
        return [{"type": "array", "items": choice} if is_list else choice]
    if leaf.metadata.get("each"):
        group = leaf.metadata["each"]
        sections = {name: _option_section_schema(group, name) for name in list_kinds(group)}
        return [{"type": "object", "properties": sections, "additionalProperties": False}]
    return _json_types_of_hint(leaf.hint, leaf.metadata)


def _option_section_schema(group: str, name: str) -> dict[str, Any]:
    """Return the schema of an option's own section; null removes the section."""
    keys = {key: value_schema(leaf) for key, leaf in option_leaves(group, name).items()}
    return {"type": ["object", "null"], "properties": keys, "additionalProperties": False}


def _json_types_of_hint(hint: Any, limits: Any) -> list[dict[str, Any]]:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return [each for part in get_args(hint) for each in _json_types_of_hint(part, limits)]
    if hint is type(None):
        return [{"type": "null"}]
    if hint is Any:
        return [{}]
    if origin is list:
        inner = _json_types_of_hint(get_args(hint)[0], {"unit": limits.get("unit")})
        return [{"type": "array", "items": {"anyOf": inner}}]
    if origin is dict:
        inner = get_args(hint)[1]
        if getattr(inner, "is_part", False):
            keys = {name: value_schema(leaf) for name, leaf in part_leaves(inner).items()}
            section = {"type": "object", "properties": keys, "additionalProperties": False}
            return [{"type": "object", "additionalProperties": section}]
        # Any scalar is accepted as the text of a variable.
        values = {"type": ["string", "number", "boolean"]} if inner is str else {}
        return [{"type": "object", "additionalProperties": values}]
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        properties = {
            item.name: {"anyOf": _json_types_of_hint(hints[item.name], item.metadata)}
            for item in fields(hint)
        }
        return [{"type": "object", "properties": properties, "additionalProperties": False}]
    if issubclass(hint, Enum):
        # YAML reads an unquoted 1 or true as a number or switch; trainctl accepts it as a name.
        return [{"enum": [member.value for member in hint]}]
    names = {int: "integer", float: "number", bool: "boolean", str: "string"}
    bounds = {"minimum": "minimum", "maximum": "maximum", "above": "exclusiveMinimum"}
    limited = {
        theirs: limits[ours] for ours, theirs in bounds.items() if limits.get(ours) is not None
    }
    kind = names[hint]
    if kind == "string":
        return [{"type": ["string", "number", "boolean"]}]
    accepted = [{"type": kind, **(limited if kind in ("integer", "number") else {})}]
    pattern = suffix_pattern(limits.get("unit") or "", is_count=kind == "integer")
    if pattern and kind != "boolean":
        accepted.append({"type": "string", "pattern": f"^{pattern}$"})
    return accepted


def _defaults_list_schema(config_dir: Path | None) -> dict[str, Any]:
    """Return the schema of a defaults list.

    A line is a recipe's name, `_self_`, or `override /GROUP: OPTION`.
    """
    choices: dict[str, Any] = {}
    for group in GROUPS:
        names = [info.name for info in list_options(group, config_dir)]
        known: list[Any] = [*names, *(int(name) for name in names if name.isdigit())]
        choice = {
            "description": f"An option of {group}.",
            "anyOf": [{"enum": known}, {"type": ["string", "integer"]}],
        }
        choices |= {f"override /{group}": choice, group: choice}
    for group in LIST_GROUPS:
        known = [
            {"enum": [info.name for info in list_options(group, config_dir)]},
            {"type": "string"},
        ]
        listed = {"description": f"Options of {group}.", "type": "array", "items": {"anyOf": known}}
        choices |= {f"override /{group}": listed, group: listed}
    starts = ["base", *(info.name for info in list_recipes(config_dir)), "_self_"]
    return {
        "description": "What the recipe starts from, then the options that it chooses.",
        "type": "array",
        "items": {
            "anyOf": [
                {"enum": starts},
                {"type": "string"},
                {
                    "type": "object",
                    "properties": choices,
                    "additionalProperties": False,
                    "minProperties": 1,
                    "maxProperties": 1,
                },
            ]
        },
    }


RECIPES = "recipe"


def write_schemas(folder: Path) -> list[Path]:
    """Write the schemas of a folder with `conf/` and `recipes/`, and return their files."""
    groups = [group for group in (*GROUPS, *LIST_GROUPS) if (folder / "conf" / group).is_dir()]
    return [_write_schema(folder, name, folder) for name in (RECIPES, *groups)]


def link_recipe(path: Path, config_dir: Path | None) -> str:
    """Write the schema of recipes beside a recipe, or beside its `recipes/`; return its comment."""
    folder = path.absolute().parent
    folder = folder.parent if folder.name == "recipes" else folder
    _write_schema(folder, RECIPES, config_dir)
    return schema_comment(path, folder, RECIPES)


def schema_comment(path: Path, folder: Path, name: str) -> str:
    """Return the line of a YAML file that names its schema in the folder.

    Args:
        name: A group, or `RECIPES`.
    """
    schema = os.path.relpath(_schema_file(folder, name), path.absolute().parent)
    return f"{SCHEMA_COMMENT}{schema}\n"


def _write_schema(folder: Path, name: str, config_dir: Path | None) -> Path:
    schema = recipe_schema(config_dir) if name == RECIPES else option_schema(name)
    renew = "To renew it: trainctl config schema --config-dir DIR --write"
    path = _schema_file(folder, name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"$comment": renew, **schema}, indent=1) + "\n", encoding="utf-8")
    return path


def _schema_file(folder: Path, name: str) -> Path:
    return folder / ".trainctl" / f"{name}.schema.json"
