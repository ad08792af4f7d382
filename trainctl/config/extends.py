"""Check of all files that a configuration extends: they exist, and set legal values only.

It reads them before Hydra does, because Hydra stops at the first problem.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trainctl.config.catalog import (
    BASE,
    UNKNOWN_RECIPE,
    Folder,
    find_config_file,
    option_names,
    recipe_names,
    unknown_option,
    unknown_recipe,
)
from trainctl.config.check import REFUSED, UNKNOWN_KEY, check_setting
from trainctl.config.schema import GROUPS, LIST_GROUPS
from trainctl.config.suggest import did_you_mean, nearest_names
from trainctl.config.yaml_files import (
    UNREADABLE,
    Default,
    YamlDocument,
    leading_comment,
    read_document,
)
from trainctl.errors import Finding


def check_extends(
    folders: list[Folder], recipe: str, chosen: Mapping[str, str | list[str]]
) -> list[Finding]:
    """Return the problems of a recipe, of the chosen options, and of all files that they extend.

    Args:
        recipe: The recipe, or `base`; empty checks no recipe.
        chosen: Options chosen on the command line, by group; they replace the recipe's.
    """
    walk = _Walk(folders, chosen)
    findings = walk.recipe(recipe, ()) if recipe else []
    for group, options in chosen.items():
        for option in options if isinstance(options, list) else [options]:
            findings += walk.users_option(group, option, ())
    return findings


class _Walk:
    """One traversal of the files that extend each other."""

    def __init__(self, folders: list[Folder], chosen: Mapping[str, str | list[str]]) -> None:
        self.folders = folders
        self.chosen = chosen
        self.recipes = recipe_names(folders)

    def recipe(self, name: str, chain: tuple[str, ...]) -> list[Finding]:
        """Return the problems of a recipe or of base; `chain` holds the recipes that extend it."""
        found = find_config_file(self.folders, name)
        if found is None:
            return [unknown_recipe(self.folders, name, "")]
        folder, path = found
        document = read_document(path, folder.name_of(path))
        findings = [] if folder.is_shipped else _check_document(document, ())
        parents = [each for each in document.defaults if not each.group and each.option != "_self_"]
        for default in document.defaults:
            findings += self._option(default) if default.group else []
        for parent in parents:
            findings += self._extends(parent, (*chain, name))
        if not parents and name != BASE and not document.findings:
            findings.append(_starts_from_nothing(folder.name_of(path)))
        return findings

    def users_option(self, group: str, option: str, chain: tuple[str, ...]) -> list[Finding]:
        """Return the problems of a user's option, and of the options that it extends."""
        found = find_config_file(self.folders, f"{group}/{option}")
        if found is None or found[0].is_shipped:
            return []
        folder, path = found
        shown = folder.name_of(path)
        document = read_document(path, shown)
        findings = _check_document(document, (group, option) if group in LIST_GROUPS else (group,))
        if any(line.startswith("@package") for line in leading_comment(path)):
            findings.append(_package_finding(group, shown))
        for default in document.defaults:
            parent = str(default.option).removeprefix(f"/{group}/")
            if default.group:
                findings += self._option(default)
            elif parent in (*chain, option):
                findings.append(_circle_finding(parent, (*chain, option), default.source))
            elif parent in option_names(self.folders, group):
                findings += self.users_option(group, parent, (*chain, option))
            elif parent != "_self_":
                findings.append(unknown_option(self.folders, group, parent, default.source))
        return findings

    def _extends(self, default: Default, chain: tuple[str, ...]) -> list[Finding]:
        parent = str(default.option)
        if parent in chain:
            return [_circle_finding(parent, chain, default.source)]
        if parent != BASE and parent not in self.recipes:
            return [unknown_recipe(self.folders, parent, default.source)]
        return self.recipe(parent, chain)

    def _option(self, default: Default) -> list[Finding]:
        group, option = default.group.removeprefix("/"), default.option
        if group not in (*GROUPS, *LIST_GROUPS):
            return [_unknown_group_finding(default, group)]
        if option is None or group in self.chosen:
            return []
        if group in LIST_GROUPS and isinstance(option, list):
            each = [Default(default.group, name, default.source, name) for name in option]
            return [finding for one in each for finding in self._named(one, group)]
        return self._named(default, group)

    def _named(self, default: Default, group: str) -> list[Finding]:
        option = default.option
        if not isinstance(option, str):
            return [_not_text_finding(default, group)]
        if option not in option_names(self.folders, group):
            return [unknown_option(self.folders, group, option, default.source)]
        return self.users_option(group, option, ())


def _check_document(document: YamlDocument, prefix: tuple[str, ...]) -> list[Finding]:
    findings = list(document.findings)
    for setting in document.settings:
        findings += check_setting(replace(setting, path=(*prefix, *setting.path)))[1]
    return findings


def _package_finding(group: str, shown: str) -> Finding:
    return Finding(
        rule=REFUSED,
        key=group,
        message=f"{shown} has a @package line: an option sets keys of its own group only",
        hint="leave that line out, or make the file a recipe",
        source=f"{shown}:1",
    )


def _starts_from_nothing(shown: str) -> Finding:
    return Finding(
        rule=UNREADABLE,
        key="defaults",
        message=f"{shown} starts from no other configuration",
        hint="begin it with `defaults: [base, _self_]`, or name a recipe instead of base",
        source=shown,
    )


def _circle_finding(parent: str, chain: tuple[str, ...], source: str) -> Finding:
    circle = " -> ".join((*chain[chain.index(parent) :], parent))
    return Finding(
        rule=UNKNOWN_RECIPE,
        key="defaults",
        message=f"these extend each other in a circle: {circle}",
        hint="let one of them start from base",
        source=source,
    )


def _unknown_group_finding(default: Default, group: str) -> Finding:
    close = nearest_names(group, GROUPS)
    return Finding(
        rule=UNKNOWN_KEY,
        key=group,
        message=f"there is no group {group}",
        hint=did_you_mean(close) or f"groups: {', '.join(GROUPS)}",
        source=default.source,
    )


def _not_text_finding(default: Default, group: str) -> Finding:
    is_number = isinstance(default.option, (int, float))
    hint = f'quote it: {group}: "{default.option}"' if is_number else "name one option"
    return Finding(
        rule=UNREADABLE,
        key=group,
        message=f"{default.option!r} is not the name of an option",
        hint=hint,
        source=default.source,
    )
