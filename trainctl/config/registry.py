"""Options that are units: one Python file each, found by group and name, loaded when asked for.

A shipped one is `trainctl/options/GROUP/NAME.py`, beside its `conf/GROUP/NAME.yaml`. An installed
package registers others by entry points of the group `trainctl.options`, named `GROUP.NAME`, and
has the YAML beside the Python file: `GROUP/NAME.py` and `GROUP/NAME.yaml`. Either way the Python
file has a `SPEC`: what the option says of itself, without torch. The configuration comes before all
options and knows none by name.
"""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainctl.errors import ExitCode, TrainctlError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

SHIPPED = Path(__file__).parents[1] / "options"
ENTRY_POINTS = "trainctl.options"


WITHOUT_A_SECTION = ("engine",)
"""Groups that no section is of: the plan names the option."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What an option of any group says of itself.

    Attributes:
        name: The kind: the value of the section's key that `chooser` gives.
        keys: The dataclass of its section: what all kinds of the group share, and its own keys.
        build: `module:function` that makes it, loaded when it is called; empty where there is
            nothing to build.
        extra: Part of trainctl's package: what has the packages that `build` needs.
    """

    name: str
    keys: type
    build: str = ""
    extra: str = ""


@cache
def unit_groups() -> tuple[str, ...]:
    """The groups whose options are units, and the kinds of a section."""
    found = {path.parent.name for path in SHIPPED.glob("*/__init__.py")}
    return tuple(sorted(found.difference(WITHOUT_A_SECTION)))


@cache
def names(group: str) -> tuple[str, ...]:
    """Kinds of a group, shipped and others', by name."""
    return tuple(sorted({*_shipped(group), *_entry_points(group)}))


@cache
def load(group: str, name: str) -> Any:
    """The spec of an option.

    Raises:
        TrainctlError: There is none of that name, or what registered it cannot be loaded.
    """
    if name in _shipped(group):  # nobody changes what a known name means
        return importlib.import_module(f"trainctl.options.{group}.{name}").SPEC
    registered = _entry_points(group).get(name)
    if registered is None:
        raise TrainctlError(
            f"{group} has no kind {name!r} here",
            hint=f"it has {', '.join(names(group))}; a package that brings another must be "
            "installed on every machine of the run",
            exit_code=ExitCode.environment,
        )
    try:
        spec = registered.load()
    except Exception as error:  # whatever the package does when it is imported
        raise _unusable(registered, f"{type(error).__name__}: {error}") from error
    if not isinstance(spec, Spec) or spec.name != name:
        raise _unusable(registered, f"it is no spec of the name {name}")
    return spec


def _unusable(registered: EntryPoint, why: str) -> TrainctlError:
    package = registered.dist.name if registered.dist is not None else registered.module
    return TrainctlError(
        f"the option {registered.name} of the package {package} cannot be used: {why}",
        hint=f"repair or uninstall {package}",
        exit_code=ExitCode.environment,
    )


def specs(group: str) -> tuple[Any, ...]:
    """All specs of a group, by name."""
    return tuple(load(group, name) for name in names(group))


def section_class(group: str, kind: str) -> type:
    """The dataclass of a group's section under a kind."""
    keys: type = load(group, kind).keys
    return keys


def new_section(group: str, kind: str, **values: Any) -> Any:
    """A section of that kind, with its defaults where nothing else is given."""
    return section_class(group, kind)(**{chooser(group): kind}, **values)


def changed_section(section: Any, **values: Any) -> Any:
    """A section with other values; where they choose another kind, what that has of the rest."""
    group = getattr(section, "units", "")
    kind = values.get(chooser(group)) if group else None
    if kind is None or kind == kind_of(section):
        return replace(section, **values)
    own = {item.name for item in fields(section_class(group, kind))}
    kept = {item.name: getattr(section, item.name) for item in fields(section) if item.name in own}
    return section_class(group, kind)(**{**kept, **values})


@cache
def chooser(group: str) -> str:
    """The key of a group's section that names the kind: `kind` in most."""
    shared = fields(section_class(group, _shipped(group)[0]))
    return next(item.name for item in shared if item.metadata.get("units") == group)


def kind_of(section: Any) -> str:
    """The kind that a section of units has."""
    kind: str = getattr(section, chooser(section.units))
    return kind


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
        key = group if group in WITHOUT_A_SECTION else f"{group}.{chooser(group)}"
        raise TrainctlError(
            f"{key}={kind} needs a package that is missing ({missing})",
            hint=f"{what}, or choose another {group}",
            exit_code=ExitCode.environment,
        ) from None


def packaged_folders() -> dict[str, Path]:
    """Folders of the packages that register options, by name: each has `GROUP/NAME.yaml`."""
    found: dict[str, Path] = {}
    for each in _registered():
        with suppress(ImportError):  # of a package that is broken: `load` says so
            module = importlib.util.find_spec(each.module)
            if module is not None and module.origin is not None:
                folder = Path(module.origin).parents[1]
                found[folder.name] = folder
    return found


@cache
def _shipped(group: str) -> tuple[str, ...]:
    return tuple(path.stem for path in (SHIPPED / group).glob("[!_]*.py"))


@cache
def _registered() -> tuple[EntryPoint, ...]:
    from importlib.metadata import entry_points

    return tuple(entry_points(group=ENTRY_POINTS))


def _entry_points(group: str) -> dict[str, EntryPoint]:
    prefix = f"{group}."
    return {
        each.name.removeprefix(prefix): each
        for each in _registered()
        if each.name.startswith(prefix)
    }
