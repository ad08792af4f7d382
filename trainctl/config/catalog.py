"""Catalog of recipes and options in the folders that are searched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainctl.config.registry import packaged_folders
from trainctl.config.schema import GROUPS, LIST_GROUPS
from trainctl.config.suggest import (
    UNSUPPORTED_OPTIONS,
    did_you_mean,
    nearest_names,
    variant_hint,
)
from trainctl.config.yaml_files import leading_comment, read_document
from trainctl.errors import Finding, Severity, TrainctlError
from trainctl.models.local_path import local_path

BASE = "base"
OPEN = "auto"
"""The hardware option of a recipe that does not fix its hardware."""
SHADOWS, NOT_READ, UNKNOWN_OPTION, UNKNOWN_RECIPE = "TC106", "TC107", "TC108", "TC109"
HARDWARE_PATTERN = re.compile(r"(?:(\d{1,18})x)?(\d{1,18})x(.+)")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that is searched for options (`GROUP/NAME.yaml`) and recipes (`NAME.yaml`)."""

    path: Path
    """Absolute path."""
    shown: str
    """Name of the folder in messages."""
    is_shipped: bool
    """Whether it came with trainctl."""
    has_recipes: bool
    """Whether YAML files directly inside are recipes."""

    def name_of(self, path: Path) -> str:
        return f"{self.shown}/{path.relative_to(self.path).as_posix()}"


@dataclass(frozen=True, slots=True)
class OptionInfo:
    group: str
    name: str
    summary: str
    """First line of the file's leading comment."""
    path: Path
    is_users: bool
    """Whether the file is in a folder of the user's."""


@dataclass(frozen=True, slots=True)
class RecipeInfo:
    """One recipe."""

    name: str
    summary: str
    """First line of the file's leading comment."""
    description: str
    """The rest of that comment: hardware, and the source of the hyperparameters."""
    hardware: str
    """Hardware as typed, such as `8x8xh100-80g`; empty if the recipe does not fix it."""
    path: Path
    is_users: bool
    """Whether the file is in a folder of the user's."""


def shipped_root() -> Path:
    """Return the parent of the shipped `conf/` and `recipes/`: in the package, else the
    repository.
    """
    package = Path(__file__).resolve().parents[1]
    inside = package / "_shipped"
    return inside if inside.is_dir() else package.parent


def search_folders(config_dir: Path | None = None) -> list[Folder]:
    """Return the folders in search order.

    First `config_dir`, then the current directory's folders, then those of installed packages that
    bring options, then the shipped ones.

    Raises:
        TrainctlError: `config_dir` is no folder, or holds neither options nor recipes.
    """
    root = shipped_root()
    shipped = [
        Folder(root / "conf", "conf", True, False),
        Folder(root / "recipes", "recipes", True, True),
    ]
    users = _config_dir(config_dir) if config_dir is not None else []
    here = Path.cwd()
    users += _conf_and_recipes(here, "")
    users += [Folder(path, name, False, False) for name, path in packaged_folders().items()]
    taken = {folder.path for folder in shipped}
    mine = []
    for folder in users:
        if folder.path not in taken:
            mine.append(folder)
            taken.add(folder.path)
    return [*mine, *shipped]


def list_recipes(config_dir: Path | None = None) -> list[RecipeInfo]:
    """Return all recipes, the user's first, then by name; shadowed ones are left out."""
    folders = search_folders(config_dir)
    found: dict[str, RecipeInfo] = {}
    for folder in folders:
        for path in sorted(folder.path.glob("*.yaml")) if folder.has_recipes else []:
            if path.stem != BASE:
                found.setdefault(path.stem, _read_recipe_info(path, folder, folders))
    return sorted(
        found.values(), key=lambda info: (not info.is_users, _natural_sort_key(info.name))
    )


def list_options(group: str, config_dir: Path | None = None) -> list[OptionInfo]:
    """Return all options of a group, by name; shadowed ones are left out."""
    return list_options_in(search_folders(config_dir), group)


def list_options_in(folders: list[Folder], group: str) -> list[OptionInfo]:
    """Return all options of a group in these folders, as `list_options` does."""
    found: dict[str, OptionInfo] = {}
    for folder in folders:
        for path in (folder.path / group).glob("*.yaml"):
            comment = leading_comment(path)
            info = OptionInfo(
                group, path.stem, comment[0] if comment else "", path, not folder.is_shipped
            )
            found.setdefault(path.stem, info)
    return sorted(found.values(), key=lambda info: _natural_sort_key(info.name))


def find_config_file(folders: list[Folder], config_path: str) -> tuple[Folder, Path] | None:
    """Return the file of a config path such as `model/llama-7b`; the first folder wins."""
    for folder in folders:
        path = folder.path / f"{config_path}.yaml"
        if path.is_file():
            return folder, path
    return None


def option_names(folders: list[Folder], group: str) -> list[str]:
    """Return the names of a group's options, without reading the files."""
    names = {path.stem for folder in folders for path in (folder.path / group).glob("*.yaml")}
    return sorted(names, key=_natural_sort_key)


def recipe_names(folders: list[Folder]) -> list[str]:
    """Return the names of all recipes, without reading the files."""
    kept = [folder for folder in folders if folder.has_recipes]
    names = {path.stem for folder in kept for path in folder.path.glob("*.yaml")}
    return sorted(names - {BASE}, key=_natural_sort_key)


def chosen_options(
    folders: list[Folder], recipe: str, seen: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return the option that a recipe chooses for each group, itself or through what it extends.

    Groups that are lists have a list of names.
    """
    found = find_config_file(folders, recipe)
    if found is None or recipe in seen:
        return {}
    folder, path = found
    own: dict[str, Any] = {}
    extended: dict[str, Any] = {}
    for default in read_document(path, folder.name_of(path)).defaults:
        if default.group:
            is_plain = default.option is None or isinstance(default.option, list)
            option = default.option if is_plain else str(default.option)
            own.setdefault(default.group.strip("/"), option)
        elif default.option != "_self_":
            extended |= chosen_options(folders, str(default.option), seen | {recipe})
    return extended | own


def split_hardware(written: str) -> tuple[int | None, int | None, str]:
    """Split `4x8xh100-80g` into nodes, devices per node and option; a missing count is None."""
    match = HARDWARE_PATTERN.fullmatch(written)
    if not match:
        return None, None, written
    nodes, devices, name = match.groups()
    return int(nodes) if nodes else None, int(devices), name


def unknown_option(
    folders: list[Folder], group: str, option: str, source: str, count: str = ""
) -> Finding:
    """Return the finding for an option that its group lacks, with the nearest names.

    `count` is what was typed before the option, such as `8x` in `hardware=8xh100`.
    """
    names = option_names(folders, group)
    if option.lower() in UNSUPPORTED_OPTIONS.get(group, ()):
        hint = f"trainctl does not have {option}."
    elif not (hint := variant_hint(group, option)):
        form = "[{}]" if group in LIST_GROUPS else f"{count}{{}}"
        hint = did_you_mean(
            [f"{group}={form.format(name)}" for name in nearest_names(option, names)]
        )
    listed = f"options of {group}: {', '.join(names) or 'none here'}"
    return Finding(
        rule=UNKNOWN_OPTION,
        key=group,
        message=f"{group} has no option {option!r}",
        hint=f"{hint} {listed}".strip(),
        source=source,
    )


def unknown_recipe(folders: list[Folder], name: str, source: str) -> Finding:
    """Return the finding for an unknown recipe, with the nearest names and all of them."""
    names = recipe_names(folders)
    hint = did_you_mean([f"recipe={close}" for close in nearest_names(name, names)])
    return Finding(
        rule=UNKNOWN_RECIPE,
        key="recipe",
        message=f"there is no recipe {name!r}",
        hint=f"{hint} recipes: {', '.join(names)}".strip(),
        source=source,
    )


def shadowing_warning(folders: list[Folder], config_path: str) -> Finding | None:
    """Return a warning if a user's file hides one with the same name and different content."""
    holders = [
        (folder, path)
        for folder in folders
        if (path := folder.path / f"{config_path}.yaml").is_file()
    ]
    if len(holders) < 2 or holders[0][1].read_bytes() == holders[1][1].read_bytes():
        return None
    (folder, path), (other, hidden) = holders[:2]
    whose = "shipped " if other.is_shipped else ""
    group = config_path.rpartition("/")[0]
    return Finding(
        rule=SHADOWS,
        key=group or "recipe",
        message=f"{path} hides the {whose}{other.name_of(hidden)}",
        hint="rename your file if you mean both",
        severity=Severity.warning,
        source=f"{folder.name_of(path)}",
    )


def ignored_yml_files(folders: list[Folder]) -> list[Finding]:
    """Return a warning for each file of the user's that is ignored because it ends in `.yml`."""
    found = []
    for folder in folders:
        groups = [] if folder.is_shipped else [*GROUPS, *LIST_GROUPS]
        places = ["", *(f"{group}/" for group in groups)] if groups else []
        for path in [each for place in places for each in folder.path.glob(f"{place}*.yml")]:
            found.append(
                Finding(
                    rule=NOT_READ,
                    message=f"{folder.name_of(path)} is not read",
                    hint=f"name it {path.stem}.yaml",
                    severity=Severity.warning,
                )
            )
    return found


def _config_dir(given: Path) -> list[Folder]:
    folder = local_path(given).absolute()
    if not folder.is_dir():
        raise TrainctlError(
            f"--config-dir {given} is not a folder", hint="give a folder of conf/ and recipes/"
        )
    nested = _conf_and_recipes(folder, str(given))
    if nested:
        return nested
    has_options = any((folder / group).is_dir() for group in (*GROUPS, *LIST_GROUPS))
    if not has_options and not any(folder.glob("*.yaml")):
        raise TrainctlError(
            f"--config-dir {given} holds neither options nor recipes",
            hint="put options into conf/GROUP/NAME.yaml and recipes into recipes/NAME.yaml there",
        )
    return [Folder(folder, str(given), False, True)]


def _conf_and_recipes(root: Path, shown: str) -> list[Folder]:
    prefix = f"{shown}/" if shown else ""
    pair = [
        Folder((root / "conf").resolve(), f"{prefix}conf", False, False),
        Folder((root / "recipes").resolve(), f"{prefix}recipes", False, True),
    ]
    return [folder for folder in pair if folder.path.is_dir()]


def _read_recipe_info(path: Path, folder: Folder, folders: list[Folder]) -> RecipeInfo:
    comment = leading_comment(path)
    return RecipeInfo(
        name=path.stem,
        summary=comment[0] if comment else "",
        description=" ".join(comment[1:]),
        hardware=_declared_hardware(path.stem, folders),
        path=path,
        is_users=not folder.is_shipped,
    )


def _declared_hardware(name: str, folders: list[Folder]) -> str:
    option = chosen_options(folders, name).get("hardware") or OPEN
    nodes, devices = _declared_devices(name, folders, frozenset())
    if option == OPEN:
        return ""
    parts = [str(nodes)] if nodes and nodes != 1 else []
    parts += [str(devices)] if devices and (devices != 1 or parts) else []
    return "x".join([*parts, option])


def _declared_devices(name: str, folders: list[Folder], seen: frozenset[str]) -> tuple[int, int]:
    """Return the nodes and devices per node that a recipe sets or inherits; 0 if not set."""
    found = find_config_file(folders, name)
    if found is None or name in seen or name == BASE:
        return 0, 0
    folder, path = found
    document = read_document(path, folder.name_of(path))
    nodes, devices = 0, 0
    for default in document.defaults:
        if not default.group and default.option != "_self_":
            nodes, devices = _declared_devices(str(default.option), folders, seen | {name})
    counts = {setting.key: setting.value for setting in document.settings}
    own_nodes = counts.get("hardware.nodes", nodes)
    own_devices = counts.get("hardware.devices_per_node", devices)
    return (
        own_nodes if isinstance(own_nodes, int) else 0,
        own_devices if isinstance(own_devices, int) else 0,
    )


def _natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts 7b before 13b."""
    return [
        (int(part), "") if re.fullmatch("[0-9]+", part) else (-1, part)
        for part in re.split("([0-9]{1,9})", name)
        if part
    ]
