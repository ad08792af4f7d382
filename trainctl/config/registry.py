"""Options that are units: one Python file each, found by group and name, loaded when asked for.

A shipped one is `trainctl/options/GROUP/NAME.py`, beside its `conf/GROUP/NAME.yaml`. A package
registers others by entry points of the group `trainctl.options`, named `GROUP.NAME`, and a folder
that was given to `add_folder` has them as `GROUP/NAME.py`. Whichever it is has a `SPEC`: what it
says of itself, without torch. The configuration comes before all options and knows none by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from trainctl.errors import ExitCode, TrainctlError

SHIPPED = Path(__file__).parents[1] / "options"
ENTRY_POINTS = "trainctl.options"

_folders: list[Path] = []


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What an option of any group says of itself.

    Attributes:
        name: As it is chosen, `GROUP=NAME`; also its `kind`.
        keys: The dataclass of its section: what all kinds of the group share, and its own keys.
        build: `module:function` that makes it, loaded when it is called; empty where there is
            nothing to build.
        extra: Of trainctl's package: what has the packages that `build` needs.
    """

    name: str
    keys: type
    build: str = ""
    extra: str = ""


def add_folder(folder: Path) -> None:
    """Look for options in a folder of the user's too, whose code then runs in every process.

    Args:
        folder: Holds `GROUP/NAME.py`.
    """
    _folders.append(folder)
    for found in (names, load, own_keys):
        found.cache_clear()


@cache
def unit_groups() -> tuple[str, ...]:
    """The groups whose options are units."""
    return tuple(sorted(path.parent.name for path in SHIPPED.glob("*/__init__.py")))


@cache
def names(group: str) -> tuple[str, ...]:
    """Kinds of a group, shipped and others', by name."""
    return tuple(sorted({*_files(group), *_entry_points(group)}))


@cache
def load(group: str, name: str) -> Any:
    """The spec of an option.

    Raises:
        TrainctlError: There is none of that name, or what registered it cannot be loaded.
    """
    where = _files(group).get(name) or _entry_points(group).get(name)
    if where is None:
        raise TrainctlError(
            f"{group} has no kind {name!r} here",
            hint=f"it has {', '.join(names(group))}; a package that brings another must be "
            "installed on every machine of the run",
            exit_code=ExitCode.environment,
        )
    try:
        spec = _load_file(group, where) if isinstance(where, Path) else where.load()
    except Exception as error:
        raise TrainctlError(
            f"the option {group}={name} of {where} cannot be loaded: "
            f"{type(error).__name__}: {error}",
            hint="repair it, or uninstall the package that brings it",
            exit_code=ExitCode.environment,
        ) from error
    if not isinstance(spec, Spec) or spec.name != name:
        raise TrainctlError(
            f"{where} registers {group}={name}, and what it has is no spec of that name",
            hint="docs/options.md shows a whole one",
            exit_code=ExitCode.environment,
        )
    return spec


def specs(group: str) -> tuple[Any, ...]:
    """All specs of a group, by name."""
    return tuple(load(group, name) for name in names(group))


def section_class(group: str, kind: str) -> type:
    """The dataclass of a group's section under a kind."""
    keys: type = load(group, kind).keys
    return keys


def new_section(group: str, kind: str, **values: Any) -> Any:
    """A section of that kind, with its defaults where nothing else is given."""
    return section_class(group, kind)(kind=kind, **values)


@cache
def own_keys(group: str) -> frozenset[str]:
    """Names of the keys that some kind of the group has, those that all share among them."""
    return frozenset(item.name for spec in specs(group) for item in fields(spec.keys))


def function_of(group: str, kind: str, entry: str = "build") -> Any:
    """What one of a kind's entries names, imported.

    Args:
        group: The group.
        kind: Its kind.
        entry: The attribute of its spec, a `module:function`.

    Raises:
        TrainctlError: A package that it needs is missing (exit code 4).
    """
    spec = load(group, kind)
    module, _, name = getattr(spec, entry).partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as missing:
        what = f"pip install 'trainctl[{spec.extra}]'" if spec.extra else "install it"
        raise TrainctlError(
            f"{group}.kind={kind} needs a package that is missing ({missing})",
            hint=f"{what}, or choose another {group}",
            exit_code=ExitCode.environment,
        ) from None


def _files(group: str) -> dict[str, Path]:
    """Shipped ones win over those of a folder: nobody changes what a known name means."""
    found: dict[str, Path] = {}
    for folder in (*reversed(_folders), SHIPPED):
        for path in (folder / group).glob("[!_]*.py"):
            found[path.stem] = path
    return found


@cache
def _registered() -> tuple[Any, ...]:
    from importlib.metadata import entry_points

    return tuple(entry_points(group=ENTRY_POINTS))


def _entry_points(group: str) -> dict[str, Any]:
    prefix = f"{group}."
    return {
        each.name.removeprefix(prefix): each
        for each in _registered()
        if each.name.startswith(prefix)
    }


def _load_file(group: str, path: Path) -> Any:
    name = f"trainctl.options.{group}.{path.stem}"
    if path.is_relative_to(SHIPPED):
        return importlib.import_module(name).SPEC
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module.SPEC
