"""Check of all files that a configuration extends: they exist, and set legal values only.

It reads them before Hydra does, because Hydra stops at the first problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

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
from trainctl.config.check import REFUSED, UNKNOWN_KEY, Setting, check_setting
from trainctl.config.keys import as_written
from trainctl.config.layers import Layer, Stack
from trainctl.config.schema import GROUPS, LIST_GROUPS
from trainctl.config.secrets import redact_setting
from trainctl.config.suggest import did_you_mean, nearest_names
from trainctl.config.yaml_files import (
    UNREADABLE,
    Default,
    YamlDocument,
    leading_comment,
    read_document,
)
from trainctl.errors import Finding, Severity

OVERRIDDEN = "TC585"


@dataclass(frozen=True, slots=True)
class AppliedFile:
    """A file of a configuration, with the settings that it made."""

    path: str
    """Config path: `tiny`, `optimizer/adamw`."""
    document: YamlDocument
    level: Sequence[Setting]
    is_shipped: bool

    @property
    def extends(self) -> list[str]:
        """Config paths of the files that it extends."""
        folder = self.path.rpartition("/")[0]
        names = [str(each.option).removeprefix(f"/{folder}/") for each in parents_of(self.document)]
        return [f"{folder}/{name}".removeprefix("/") for name in names]


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
        parents = parents_of(document)
        if not folder.is_shipped:
            findings += _misplaced_lines(document, parents)
        for default in document.defaults:
            findings += self._options(default) if default.group else []
        for parent in parents:
            findings += self._extends(parent, (*chain, name))
        if not parents and name != BASE and not findings:
            shown = folder.name_of(path)
            what = f"{shown} starts from no other configuration"
            hint = "begin it with `defaults: [base, _self_]`, or name a recipe instead of base"
            findings.append(_finding(UNREADABLE, "defaults", what, hint, shown))
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
            what = f"{shown} has a @package line: an option sets keys of its own group only"
            hint = "leave that line out, or make the file a recipe"
            findings.append(_finding(REFUSED, group, what, hint, f"{shown}:1"))
        for default in document.defaults:
            parent = str(default.option).removeprefix(f"/{group}/")
            if default.group:
                findings += self._options(default)
            elif parent in (*chain, option):
                findings.append(_circle_finding(parent, (*chain, option), default.source))
            elif parent in option_names(self.folders, group):
                findings += self.users_option(group, parent, (*chain, option))
            elif parent != "_self_":
                findings.append(unknown_option(self.folders, group, parent, default.source))
        return findings

    def _extends(self, default: Default, chain: tuple[str, ...]) -> list[Finding]:
        parent = str(default.option)
        key, is_assigned, option = (word.strip() for word in parent.partition("="))
        if is_assigned:
            line = option if key == "recipe" else f"override /{key}: {option}"
            what = f"`- {parent}` is no line of a defaults list"
            return [_finding(UNREADABLE, "defaults", what, f"write `- {line}`", default.source)]
        if parent in chain:
            return [_circle_finding(parent, chain, default.source)]
        if parent != BASE and parent not in self.recipes:
            return [unknown_recipe(self.folders, parent, default.source)]
        return self.recipe(parent, chain)

    def _options(self, default: Default) -> list[Finding]:
        """Return the problems of a line that chooses an option, or several of a list."""
        group, option = default.group.removeprefix("/"), default.option
        if group not in (*GROUPS, *LIST_GROUPS):
            known = did_you_mean(nearest_names(group, GROUPS)) or f"groups: {', '.join(GROUPS)}"
            known = f"write `- {option}`" if group == "recipe" else known
            what = f"there is no group {group}"
            return [_finding(UNKNOWN_KEY, group, what, known, default.source)]
        if option is None or group in self.chosen:
            return []
        names = option if group in LIST_GROUPS and isinstance(option, list) else [option]
        return [each for name in names for each in self._named(group, name, default.source)]

    def _named(self, group: str, option: Any, source: str) -> list[Finding]:
        if not isinstance(option, str):
            is_number = isinstance(option, (int, float))
            hint = f'quote it: {group}: "{option}"' if is_number else "name one option"
            what = f"{option!r} is not the name of an option"
            return [_finding(UNREADABLE, group, what, hint, source)]
        if option not in option_names(self.folders, group):
            return [unknown_option(self.folders, group, option, source)]
        return self.users_option(group, option, ())


def parents_of(document: YamlDocument) -> list[Default]:
    """Return the lines of a defaults list that name a file to extend."""
    return [each for each in document.defaults if not each.group and each.option != "_self_"]


def _misplaced_lines(document: YamlDocument, parents: Sequence[Default]) -> Iterator[Finding]:
    """Find lines of a recipe's defaults list that Hydra refuses without naming their place."""
    lines = document.defaults
    named = [each for each in parents if "=" not in str(each.option)]
    for first, second in pairwise(named):
        what = "a recipe starts from one other, and each of these chooses an option for each group"
        hint = f"keep one of {first.option} and {second.option}"
        yield _finding(UNREADABLE, "defaults", what, hint, second.source)
    for each in [line for line in lines if line.option == "_self_"][1:]:
        hint = "keep the last one, so that the recipe's own keys hold"
        yield _finding(UNREADABLE, "defaults", "`_self_` twice", hint, each.source)
    for each in lines if named else ():
        group, first = each.group.removeprefix("/"), named[0]
        what, hint = "", ""
        if group in (*GROUPS, *LIST_GROUPS) and not each.is_override:
            what = f"{first.option} has chosen an option of {group} already"
            hint = f"write `- override /{group}: {as_written(each.option)}`"
        elif each.is_override and lines.index(each) < lines.index(first):
            what = f"this line changes an option that `- {first.option}` has yet to choose"
            hint = f"move it below `- {first.option}`"
        if what:
            yield _finding(UNREADABLE, group, what, hint, each.source)


def late_parents(document: YamlDocument) -> list[Default]:
    """Return the files to extend that a defaults list names after `_self_`."""
    parents = parents_of(document)
    own = [index for index, each in enumerate(document.defaults) if each.option == "_self_"]
    return [each for each in parents if own and document.defaults.index(each) > own[-1]]


def overridden_keys(stack: Stack, applied: Sequence[AppliedFile]) -> Iterator[Finding]:
    """Yield a warning for each file of the user's whose keys a later line of its own defaults list
    sets to other values.

    Args:
        applied: All files in the order in which they were applied.
    """
    for index, own in enumerate(applied):
        late = late_parents(own.document)
        if own.is_shipped or not late:
            continue
        children, brought = {own.path}, dict[str, str]()
        for other in applied[index + 1 :]:
            if children & set(other.extends):
                children.add(other.path)
            else:
                brought |= {setting.key: setting.source for setting in other.level}
        lost = []
        for key, value in {each.key: each.value for each in own.level}.items():
            source, layer = brought.get(key), stack.layers.get(key, [Layer("", value)])[-1]
            if source and layer.source.startswith(source) and layer.value != value:
                lost.append(f"{redact_setting(f'{key}={as_written(layer.value)}')} ({source})")
        if lost:
            yield Finding(
                rule=OVERRIDDEN,
                message=f"`- {late[0].option}` after `_self_` overrides keys of this file: "
                f"{', '.join(lost)}",
                hint="make `- _self_` the last line of the defaults list",
                severity=Severity.warning,
                source=late[0].source,
            )


def _check_document(document: YamlDocument, prefix: tuple[str, ...]) -> list[Finding]:
    findings = list(document.findings)
    for setting in document.settings:
        findings += check_setting(replace(setting, path=(*prefix, *setting.path)))[1]
    return findings


def _circle_finding(parent: str, chain: tuple[str, ...], source: str) -> Finding:
    circle = " -> ".join((*chain[chain.index(parent) :], parent))
    what = f"these extend each other in a circle: {circle}"
    return _finding(UNKNOWN_RECIPE, "defaults", what, "let one of them start from base", source)


def _finding(rule: str, key: str, message: str, hint: str, source: str) -> Finding:
    return Finding(rule=rule, key=key, message=message, hint=hint, source=source)
