"""JSON Schemas in a user's folder, which an editor finds by the first line of a YAML file.

The YAML language server (VS Code's YAML extension, and others) reads a comment that names a schema,
relative to the YAML file. `DIR/.trainctl/` has one schema of recipes, and one of each group of
options that the folder has. They list the options of the folder as it was when they were written.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from trainctl.config.json_schema import option_schema, recipe_schema
from trainctl.config.schema import GROUPS, LIST_GROUPS
from trainctl.config.yaml_files import SCHEMA_COMMENT

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
