"""Parser of overrides: the recipe, the chosen options, and the keys that are set.

Every override is checked before anything is composed, so that all problems of a command line are
reported at once (Hydra stops at the first). `zero_stage=3` and `hardware=4x8xh100-80g` are parsed
here too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainctl.config.catalog import (
    Folder,
    option_names,
    recipe_names,
    split_hardware,
    unknown_option,
    unknown_recipe,
)
from trainctl.config.check import REFUSED, Setting, check_setting
from trainctl.config.keys import is_named_section, is_removal, leaves
from trainctl.config.schema import GROUPS, LIST_GROUPS
from trainctl.config.secrets import redact_setting
from trainctl.errors import Finding, Severity, TrainctlError

ALIAS, SYNTAX, GIVEN_TWICE = "TC100", "TC110", "TC111"

ALIASES = {"data.sequence_length": "training.sequence_length"}
"""Other names that overrides may use for a key."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An option chosen for a group, or a list of them, and the override that chose it."""

    option: str | list[str]
    source: str


@dataclass(slots=True)
class Overrides:
    """Parsed overrides of a command line."""

    recipe: Choice | None = None
    """Chosen recipe; None if no override names one."""
    choices: dict[str, Choice] = field(default_factory=dict)
    """Option chosen for each group."""
    settings: list[Setting] = field(default_factory=list)
    """Keys set, in order, converted to their types."""
    findings: list[Finding] = field(default_factory=list)
    """All problems; wrong overrides are left out of the other fields."""


def split_target(arguments: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """Split arguments into a leading recipe or run, if there is one, and the overrides after it.

    An override always has a ``=`` or starts with ``~``, so anything else in front is a target. So
    is a directory with a ``/`` before the ``=``, which no key has: ``runs/lr=1e-3``.
    """
    first, *rest = arguments or [""]
    key, equals, _ = first.partition("=")
    is_target = not equals or ("/" in key and Path(first).is_dir())
    if first and is_target and not first.startswith("~"):
        return first, rest
    return None, list(arguments or [])


def recipe_as_override(arguments: Sequence[str] | None) -> list[str]:
    """Return the overrides, with the name of a recipe in front of them as `recipe=NAME`."""
    target, overrides = split_target(arguments)
    return overrides if target is None else [f"recipe={target}", *overrides]


def merge_overrides(overrides: Sequence[str], more: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides followed by `more`, without those that `more` sets again."""
    again = {_override_key(text) for text in more}
    return (*(text for text in overrides if _override_key(text) not in again), *more)


def _override_key(text: str) -> str:
    name = text.partition("=")[0].strip().lstrip("+")
    return ALIASES.get(name, name)


def read_overrides(texts: Sequence[str], folders: list[Folder]) -> Overrides:
    """Parse each override by Hydra's grammar and check it."""
    result = Overrides()
    if not texts:
        return result
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    given: dict[str, str] = {}
    for written in texts:
        text = redact_setting(written)
        parsed = _parse_override(parser, written, text, folders)
        if isinstance(parsed, Finding):
            result.findings.append(parsed)
            continue
        name = parsed.key_or_group
        if name in given:
            message = f"{given[name]} has no effect: {text} comes after it"
            hint = f"keep one {name}="
            result.findings.append(_warning(GIVEN_TWICE, name, message, hint, text))
        given[name] = text
        _read_override(parsed, written, text, folders, result)
    return result


def _parse_override(parser: Any, override: str, text: str, folders: list[Folder]) -> Any:
    """Return Hydra's parsed override, or the finding that says why it is refused.

    Args:
        text: The override with secrets redacted, for messages.
    """
    from hydra.errors import HydraException

    key, equals, value = text.partition("=")
    if not equals and not text.startswith("~"):
        hint = "write GROUP=OPTION or KEY=VALUE"
        if text in recipe_names(folders):
            hint = f"write recipe={text}"
        elif text in GROUPS or text == "recipe":
            hint = f"write {text}=OPTION"
        elif text in LIST_GROUPS:
            hint = f"write {text}=[OPTION]"
        elif text in leaves() or text in ALIASES:
            hint = f"write {text}=VALUE"
        return _syntax_finding(text, f"{text!r} is not an override", hint)
    try:
        parsed = parser.parse_override(override)
    except (HydraException, ValueError, RecursionError):
        quoted = value.replace("\\", "\\\\").replace('"', '\\"')
        hint = f"""quote the value: '{key}="{quoted}"'""" if key.strip() else "write KEY=VALUE"
        return _syntax_finding(text, f"{text!r} does not follow the grammar of overrides", hint)
    name = str(parsed.key_or_group)
    if not name:
        return _syntax_finding(text, f"{text!r} names no key", "write GROUP=OPTION or KEY=VALUE")
    if parsed.is_delete() and (equals or not is_named_section(tuple(name.split(".")))):
        hint = f"set another value: {name}=VALUE"
        return _refused_finding(name, text, "a key cannot be deleted: each has a value", hint)
    if parsed.is_sweep_override():
        message = "several values make a sweep, and this command takes one configuration"
        hint = (
            "give one value (`trainctl sweep` takes several); if the comma belongs to it, quote it "
            f"twice: \"{name}='{value}'\""
        )
        return _refused_finding(name, text, message, hint)
    if parsed.package is not None or "/" in name:
        hint = "write GROUP=OPTION; a group is always placed under its own name"
        return _refused_finding(name, text, "packages and paths of groups are not used here", hint)
    return parsed


def _read_override(
    parsed: Any, override: str, text: str, folders: list[Folder], result: Overrides
) -> None:
    name, value = str(parsed.key_or_group), parsed.value()
    written = override.partition("=")[2].strip()
    if name == "recipe":
        recipe = value if isinstance(value, str) else written
        if recipe in recipe_names(folders):
            result.recipe = Choice(recipe, text)
        else:
            result.findings.append(unknown_recipe(folders, recipe, text))
    elif name in LIST_GROUPS and not isinstance(value, dict):
        _choose_options(name, value, text, folders, result)
    elif name in GROUPS:
        _choose_option(name, value if isinstance(value, str) else written, text, folders, result)
    else:
        key = ALIASES.get(name, name)
        if key != name:
            message, hint = f"{name} is read as {key}", f"write {key}="
            result.findings.append(_warning(ALIAS, key, message, hint, text))
        setting = Setting(tuple(key.split(".")), value, text, written)
        if isinstance(value, dict) and is_removal(setting.path, None):  # it replaces the section
            result.settings.append(replace(setting, value=None, text=None))
        settings, findings = check_setting(setting)
        result.settings += settings
        result.findings += findings


def _choose_option(
    group: str, option: str, text: str, folders: list[Folder], result: Overrides
) -> None:
    names = option_names(folders, group)
    nodes, devices, count = None, None, ""
    if group == "hardware" and option not in names:
        written = option
        nodes, devices, option = split_hardware(written)
        nodes = 1 if nodes is None and devices is not None else nodes  # 8xh100-80g: one node
        count = written.removesuffix(option)
    if option not in names:
        result.findings.append(unknown_option(folders, group, option, text, count))
        return
    result.choices[group] = Choice(option, text)
    for key, number in (("nodes", nodes), ("devices_per_node", devices)):
        if number is not None:
            settings, findings = check_setting(Setting((group, key), number, text))
            result.settings[:0] = settings  # first, so that hardware.nodes=2 wins
            result.findings += findings


def _choose_options(
    group: str, value: Any, text: str, folders: list[Folder], result: Overrides
) -> None:
    known = option_names(folders, group)
    wanted = [str(each) for each in (value if isinstance(value, list) else [value])]
    wrong = [unknown_option(folders, group, each, text) for each in wanted if each not in known]
    if wanted != list(dict.fromkeys(wanted)):
        twice = next(each for each in wanted if wanted.count(each) > 1)
        wrong.append(_refused_finding(group, text, f"{twice} is named twice", "name each once"))
    result.findings += wrong
    if not wrong:
        result.choices[group] = Choice(wanted, text)


def _syntax_finding(text: str, message: str, hint: str) -> Finding:
    return Finding(rule=SYNTAX, message=message, hint=hint, source=text)


def _refused_finding(key: str, text: str, message: str, hint: str) -> Finding:
    return Finding(rule=REFUSED, key=key, message=message, hint=hint, source=text)


def _warning(rule: str, key: str, message: str, hint: str, source: str) -> Finding:
    severity = Severity.warning
    return Finding(rule=rule, key=key, message=message, hint=hint, severity=severity, source=source)


MOST_RUNS = 1000
"""Maximum runs of a sweep; more are almost certainly a typing error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One run of a sweep."""

    overrides: tuple[str, ...]
    """Overrides of the run's configuration, each with one value."""
    values: dict[str, str]
    """Value of each swept key and group in this run, as text."""


def expand_sweep(overrides: Sequence[str]) -> list[SweepPoint]:
    """Return every combination of the values; the first override varies slowest.

    Args:
        overrides: In Hydra's grammar: `key=1,2`, `key=choice(a,b)`, `key=range(1,4)` have several
            values, all others one.

    Returns:
        The points. Without a swept override there is a single point, with empty `values`.

    Raises:
        TrainctlError: A value that is no list of values, such as an interval, or too many runs.
    """
    if not overrides:
        return [SweepPoint(overrides=(), values={})]
    choices = [_sweep_values(text) for text in overrides]
    count = math.prod(len(texts) for texts, _ in choices)
    if count > MOST_RUNS:
        raise TrainctlError(
            f"this sweep has {count:,} runs, and {MOST_RUNS:,} are the most",
            hint="give fewer values, or sweep in parts",
        )
    points = []
    for texts in itertools.product(*(texts for texts, _ in choices)):
        swept = [text for text, (_, is_swept) in zip(texts, choices, strict=True) if is_swept]
        values = {key: value for key, _, value in (text.partition("=") for text in swept)}
        points.append(SweepPoint(overrides=texts, values=values))
    return points


def _sweep_values(text: str) -> tuple[list[str], bool]:
    """Return the override with each of its values, and whether it has several."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError):  # composition will refuse it
        return [text], False
    if not parsed.is_sweep_override():
        return [text], False
    if not parsed.is_discrete_sweep():
        raise _sweep_error(text, "an interval has no list of values", "write them: KEY=1,2,3")
    key = parsed.get_key_element()
    try:
        return [f"{key}={value}" for value in parsed.sweep_string_iterator()], True
    except (ValueError, TypeError, NotImplementedError) as error:
        message = str(error).splitlines()[0]
        raise _sweep_error(text, message, "write the values: KEY=1,2,3") from None


def _sweep_error(text: str, message: str, hint: str) -> TrainctlError:
    return TrainctlError.from_findings([_syntax_finding(text, f"{text}: {message}", hint)])
