"""Registry of options that are Python files, found by group and name, and loaded on first use.

A shipped option is `trainctl/options/GROUP/NAME.py`, next to its `conf/GROUP/NAME.yaml`. An
installed package registers options by entry points of the group `trainctl.options`, named
`GROUP.NAME`, and ships `GROUP/NAME.yaml` next to `GROUP/NAME.py`. A user's folder has
`options/GROUP/NAME.py`, if the user trusts it. Each Python file defines `SPEC`, which needs no
torch. The configuration code comes before all options and refers to none by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import Field, dataclass, field, fields, make_dataclass, replace
from functools import cache
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar, cast

from trainctl.config.extras import install_command
from trainctl.config.suggest import variant_hint
from trainctl.errors import MachineError, TrainctlError, describe_exception
from trainctl.models.local_path import local_path

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
F = TypeVar("F", bound="Spec")

SHIPPED = Path(__file__).parents[1] / "options"
ENTRY_POINTS = "trainctl.options"
FOLDER_VARIABLE = "TRAINCTL_OPTIONS"
"""Environment variable with a folder of `GROUP/NAME.py`; trainctl runs the code there."""

TRUST_VARIABLE = "TRAINCTL_TRUST_CODE"

WITHOUT_A_SECTION = ("callbacks", "filter", "logger", "reward")
"""Groups whose options are not kinds of a section. A run may use several, given as a list of names;
an option with keys has its own section.
"""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Declaration that each option makes of itself."""

    name: str
    """Kind: the value of the section's key that `kind_key` returns."""
    keys: type
    """Dataclass of the option's section: keys that all kinds of the group share, and its own."""
    build: str | Callable[..., Any] = ""
    """Function that builds the option's object; may be empty. A `module:function` is imported when
    it is called, so the spec does not import what the function needs.
    """
    modules: tuple[str, ...] = ()
    """Modules that it imports besides those that trainctl requires; checked before a launch."""


_making = RLock()
"""Held while a class is made or code of an option is imported, so that threads take turns."""


def _cache_once(function: Callable[P, R]) -> Callable[P, R]:
    """Cache like `functools.cache`, and call the function once even if threads ask together: a
    second class of the same keys would not be equal to the first.
    """
    once: Any = cache(function)

    def locked(*arguments: Any) -> Any:
        with _making:
            return once(*arguments)

    return cast(Callable[P, R], cache(locked))


@cache
def unit_groups() -> tuple[str, ...]:
    """Return the groups whose options are the kinds of a section."""
    return tuple(group for group in _shipped_groups() if group not in WITHOUT_A_SECTION)


@cache
def list_kinds(group: str) -> tuple[str, ...]:
    """Return the kinds of a group, by name: shipped, the user's, and other packages'."""
    folder = trusted_folder()
    own = (
        (path.stem for path in option_files(folder) if path.parent.name == group) if folder else ()
    )
    return tuple(sorted({*list_shipped(group), *own, *_entry_points(group)}))


@cache
def list_shipped(group: str) -> tuple[str, ...]:
    """Return the names of a group's shipped options, which no other option can take."""
    return tuple(path.stem for path in (SHIPPED / group).glob("[!_]*.py"))


def register_options(config_dir: Path, *, is_trusted: bool) -> None:
    """Take the options of a folder of the user's, in this process and its child processes.

    Call this before anything asks for options: their names are cached.

    Args:
        is_trusted: Whether the user lets its code run; `TRAINCTL_TRUST_CODE=1` does so too.

    Raises:
        TrainctlError: The folder has Python options, and nothing allows them; or other options
            were asked for already.
    """
    folder = local_path(config_dir).absolute() / "options"
    code = option_files(folder)
    if not code or folder == trusted_folder():
        return
    if not (is_trusted or environment_trusts_code()):
        raise TrainctlError(
            f"{code[0]} is code, which runs wherever its option is read",
            hint=f"`--trust-code` runs it, and so does {TRUST_VARIABLE}=1 in the environment; or "
            "choose another folder",
        )
    if list_kinds.cache_info().currsize:
        raise TrainctlError(
            f"{code[0]} comes too late: this process has looked options up without it",
            hint="name its folder in the first call of a process, as config_dir; or set "
            f"{FOLDER_VARIABLE}={folder} before it",
        )
    trust_folder(folder)


def environment_trusts_code() -> bool:
    """Return True if `TRAINCTL_TRUST_CODE` stands for `--trust-code` in every command.

    Raises:
        TrainctlError: Its value is neither a yes nor a no.
    """
    value = os.environ.get(TRUST_VARIABLE, "")
    if value.lower() not in ("", "0", "1", "false", "true"):
        raise TrainctlError(
            f"the environment variable {TRUST_VARIABLE}={value} is neither 1 nor 0",
            hint=f"unset {TRUST_VARIABLE}, or set it to 1 where every folder of --config-dir may "
            "run code",
        )
    return value.lower() in ("1", "true")


def trust_folder(folder: Path) -> None:
    """Take options from a folder too, in this process and its child processes.

    Call this before anything asks for options: their names are cached.

    Raises:
        TrainctlError: A file there has the name of a shipped option.
    """
    for path in option_files(folder):
        if path.stem in list_shipped(path.parent.name):
            raise TrainctlError(
                f"{path} cannot be used: {path.parent.name}={path.stem} is trainctl's own",
                hint="give it another name",
            )
    os.environ[FOLDER_VARIABLE] = str(folder)


def trusted_folder() -> Path | None:
    """Return the user's folder that options are taken from, if there is one."""
    named = os.environ.get(FOLDER_VARIABLE)
    return local_path(named).absolute() if named else None


def trusted_folder_variable() -> dict[str, str]:
    """Return the environment variable that names the trusted folder to another process.

    The folder must exist there too.
    """
    folder = trusted_folder()
    return {FOLDER_VARIABLE: str(folder)} if folder else {}


def option_files(folder: Path) -> list[Path]:
    """Return the Python files of a folder that define options."""
    return [
        path for group in _shipped_groups() for path in sorted((folder / group).glob("[!_]*.py"))
    ]


def user_option_file(group: str, name: str) -> Path | None:
    """Return the file of an option from the user's folder; None for any other option."""
    folder = trusted_folder()
    path = folder / group / f"{name}.py" if folder and name not in list_shipped(group) else None
    return path if path is not None and path.is_file() else None


@cache
def load_spec(group: str, name: str) -> Any:
    """Return the spec of an option.

    Raises:
        TrainctlError: No option has that name, or its code cannot be loaded.
    """
    if name in list_shipped(group):  # shipped options cannot be overridden
        return importlib.import_module(f"trainctl.options.{group}.{name}").SPEC
    source = user_option_file(group, name) or _entry_points(group).get(name)
    if source is None:
        raise MachineError(
            f"{group} has no kind {name!r} here",
            hint=variant_hint(group, name)
            or f"it has {', '.join(list_kinds(group))}; a package that brings another must be "
            "installed on every machine of the run, and a folder of yours be named again: "
            f"`trainctl --trust-code ... --config-dir DIR`, or {FOLDER_VARIABLE}=DIR/options",
        )
    try:
        with _exit_raises():
            spec = _load_user_spec(source) if isinstance(source, Path) else source.load()
    except (Exception, SystemExit) as error:  # import runs arbitrary code
        raise _unusable_option_error(source, describe_exception(error)) from error
    if not isinstance(spec, Spec) or spec.name != name:
        raise _unusable_option_error(source, f"it is no spec of the name {name}")
    wrong = _why_not_built(spec.build)
    if wrong:
        raise _unusable_option_error(source, f"build={spec.build!r} {wrong}")
    return spec


@contextmanager
def _exit_raises() -> Iterator[None]:
    """Make `os._exit` raise while the user's code is imported: it would end the command."""

    def refuse(status: int) -> NoReturn:
        raise SystemExit(f"os._exit({status})")

    with _making:
        own, os._exit = os._exit, refuse
        try:
            yield
        finally:
            os._exit = own


def _why_not_built(build: str | Callable[..., Any]) -> str:
    """Return what is wrong with a `module:function`, as far as can be told without importing it.

    Empty if nothing is.
    """
    from trainctl.config.user_code import top_level_names

    if callable(build) or not build:
        return ""
    module, _, name = build.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        return "names no function: write module:function"
    if module in sys.modules:
        is_there = hasattr(sys.modules[module], name)
    else:
        try:
            found = importlib.util.find_spec(module)
        except ImportError:
            found = None
        if found is None:
            return f"names a function of {module}, and there is no such module"
        known = top_level_names(Path(found.origin)) if found.origin is not None else None
        is_there = known is None or name in known
    return "" if is_there else f"names a function that {module} does not define"


def _load_user_spec(path: Path) -> Any:
    """Return the spec in a user's file, imported as a module of the shipped options' package."""
    package = f"trainctl.options.{path.parent.name}"
    importlib.import_module(package).__path__.append(str(path.parent))
    return importlib.import_module(f"{package}.{path.stem}").SPEC


def _unusable_option_error(source: Path | EntryPoint, why: str) -> TrainctlError:
    if isinstance(source, Path):
        what, hint = str(source), "repair it"
    else:
        package = source.dist.name if source.dist is not None else source.module
        what = f"the option {source.name} of the package {package}"
        hint = f"repair or uninstall {package}"
    return MachineError(f"{what} cannot be used: {why}", hint=hint)


def load_specs(group: str) -> tuple[Any, ...]:
    """Return all specs of a group, by name."""
    return tuple(load_spec(group, name) for name in list_kinds(group))


def section_class(group: str, kind: str) -> type:
    """Return the dataclass of a group's section under a kind."""
    keys: type = load_spec(group, kind).keys
    return keys


@_cache_once
def with_parts(cls: type) -> type:
    """Return a section's dataclass with one more section for each option that has keys.

    The options are of the group that the class names in `parts`: `logging.NAME.KEY`.
    """
    own = [
        (spec.name, spec.keys, field(default_factory=spec.keys, metadata={"section": spec.keys}))
        for spec in load_specs(cls.parts)  # type: ignore[attr-defined]
        if fields(spec.keys)
    ]
    return make_dataclass(cls.__name__, own, bases=(cls,)) if own else cls


@_cache_once
def part_class(part: Any, kind: str) -> type:
    """Return the dataclass of a named section, such as `data.sources.NAME`, under one kind.

    It has the keys of that kind, without keys that apply to the whole run.

    Args:
        part: Base class of all such sections; its `units` names the group.
    """
    return make_dataclass(part.__name__, [], bases=(part, section_class(part.units, kind)))


def spec_lookup(section: type[S], spec: type[F]) -> Callable[[S], F]:
    """Return the function that returns the specification of the kind of a section.

    That function raises a `TrainctlError` if the package that provides the kind is not installed
    here.
    """

    def spec_of(configured: Any) -> F:
        found = load_spec(configured.units, kind_of(configured))
        assert isinstance(found, spec)
        return found

    return spec_of


def own_fields(cls: Any) -> tuple[Field[Any], ...]:
    """Return the fields of a section, or of its class, that are its keys."""
    is_part = getattr(cls, "is_part", False)
    return tuple(item for item in fields(cls) if not (is_part and item.metadata.get("whole")))


def new_section(group: str, kind: str, **values: Any) -> Any:
    """Return a section of a kind, with defaults for the values not given."""
    return section_class(group, kind)(**{kind_key(group): kind}, **values)


def changed_section(section: Any, **values: Any) -> Any:
    """Return a section with some values changed.

    If they choose another kind, only the fields that kind also has are kept.
    """
    group = getattr(section, "units", "")
    kind = values.get(kind_key(group)) if group else None
    if kind is None or kind == kind_of(section):
        return replace(section, **values)
    own = {item.name for item in fields(section_class(group, kind))}
    kept = {item.name: getattr(section, item.name) for item in fields(section) if item.name in own}
    return section_class(group, kind)(**{**kept, **values})


@cache
def kind_key(group: str) -> str:
    """Return the key of a group's section that names the kind: `kind` in most groups."""
    shared = fields(section_class(group, list_shipped(group)[0]))
    return next(item.name for item in shared if item.metadata.get("units") == group)


def kind_of(section: Any) -> str:
    """Return the kind of a section."""
    kind: str = getattr(section, kind_key(section.units))
    return kind


@cache
def own_keys(group: str) -> frozenset[str]:
    """Return the names of all keys that some kind of the group has, shared ones included."""
    return frozenset(item.name for spec in load_specs(group) for item in fields(spec.keys))


def function_of(group: str, kind: str, entry: str = "build") -> Any:
    """Return the function that an entry of an option's spec gives or names.

    Args:
        entry: Attribute of the spec, a function or a `module:function`.

    Raises:
        TrainctlError: A package that it needs is missing (exit code 4).
    """
    spec = load_spec(group, kind)
    function = getattr(spec, entry)
    if callable(function):
        return function
    module, _, name = function.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as missing:
        chosen = kind if group in WITHOUT_A_SECTION else f"{kind_key(group)}={kind}"
        what = install_command(*spec.modules) if spec.modules else "install it"
        raise MachineError(
            f"{group}.{chosen} needs a package that is missing ({missing})",
            hint=f"{what}, or choose another {group}",
        ) from None


def packaged_folders() -> dict[str, Path]:
    """Return the folders of packages that register options, by name; each has `GROUP/NAME.yaml`."""
    found: dict[str, Path] = {}
    for each in _registered_entry_points():
        with suppress(ImportError):  # a broken package: `load_spec` reports it
            module = importlib.util.find_spec(each.module)
            if module is not None and module.origin is not None:
                folder = Path(module.origin).parents[1]
                found[folder.name] = folder
    return found


@cache
def _shipped_groups() -> tuple[str, ...]:
    return tuple(sorted(path.parent.name for path in SHIPPED.glob("*/__init__.py")))


@cache
def _registered_entry_points() -> tuple[EntryPoint, ...]:
    from importlib.metadata import entry_points

    return tuple(entry_points(group=ENTRY_POINTS))


def _entry_points(group: str) -> dict[str, EntryPoint]:
    prefix = f"{group}."
    return {
        each.name.removeprefix(prefix): each
        for each in _registered_entry_points()
        if each.name.startswith(prefix)
    }
