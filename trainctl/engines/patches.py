"""What trainctl changes in other packages, or uses of them that they do not document.

Each is declared in a table, with the definition that it was written for. Another version of the
package may have another definition: then nothing that needs it starts. Tables are data, and checked
by the installed files (`trainctl.engines.source`), so no package is imported for either.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from trainctl.config.schema import RunConfig
from trainctl.engines import source
from trainctl.engines.needs import ALWAYS, Need
from trainctl.errors import ExitCode, Finding, Severity

RULE = "TC305"
"""A definition in another package is not the one that trainctl was written for."""


class How(StrEnum):
    """What trainctl does with it."""

    replaced = "replaced"
    """By other code, for the process or for a while."""
    extended = "extended"
    """By a subclass, or by another class for an object that exists."""
    called = "called"
    read = "read"
    """Or set: an attribute."""


class At(StrEnum):
    """The processes that need it."""

    rank = "rank"
    model = "model"
    """A rank, and what loads a model outside training."""
    trace = "trace"
    """What looks at a model without its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One definition in another package; exactly one of `signature`, `body` and `contains` is
    set."""

    target: str
    """Module and name, such as ``package.module:Class.method``."""
    how: How
    """What is done with it."""
    why: str
    """The reason, in a sentence."""
    signature: str = ""
    """Its parameters and their defaults, where it is called or replaced."""
    body: str = ""
    """Digest of what it does, where that is what trainctl's code relies on."""
    contains: str = ""
    """A statement or expression in it."""
    names: tuple[str, ...] = ()
    """As trainctl's code writes them, where that is not the last part of the target."""
    at: At = At.rank
    """Which processes need it."""
    need: Need = ALWAYS
    apply: str = ""
    """The function that makes the change, for the whole process, at the start of a rank."""
    upstream: str = ""
    """Address of the issue about it, if one is known."""
    fallback: str = ""
    """What happens where it is another one; empty: nothing starts."""

    @property
    def name(self) -> str:
        """The target as it is written in code."""
        return self.target.replace(":", ".")

    def is_needed(self, config: RunConfig) -> bool:
        """By a run of the configuration; by programs of the user's only what the agent needs."""
        is_ours = config.trains_itself or self.at not in (At.rank, At.model)
        return is_ours and self.need.holds(config)


@cache
def difference(use: Use) -> str:
    """Return how the installed definition differs from the one that is known; empty if it does
    not."""
    found = source.definition(use.target)
    if found is None:
        return "is not there"
    if use.contains:
        is_there = use.contains in source.text(found)
        return "" if is_there else f"does not have `{use.contains}`"
    if use.body:
        return "" if source.digest(found) == use.body else "has other code"
    if not isinstance(found, source.Function):
        return "is not a function"
    takes = source.signature(found)
    return "" if takes == use.signature else f"takes {takes}, not {use.signature}"


@dataclass(frozen=True, slots=True)
class Table:
    """All uses of one package."""

    package: str
    """As it is installed and imported."""
    read_in: tuple[str, ...]
    """Versions whose code has been read."""
    uses: tuple[Use, ...]
    """What is used of it."""
    need: Need = ALWAYS
    """Which configurations use it at all."""

    @property
    def version(self) -> str | None:
        """The installed version, if it is installed."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None

    @property
    def is_installed(self) -> bool:
        """Whether it can be imported; whoever looks at the packages tells where it must be."""
        return source.package_folder(self.package) is not None

    def is_needed(self, use: Use, config: RunConfig) -> bool:
        """Return one of the uses, by a run of the configuration."""
        return self.need.holds(config) and use.is_needed(config)

    def needed(self, config: RunConfig, at: Collection[At]) -> list[Use]:
        """What those processes of a run use of it."""
        return [use for use in self.uses if use.at in at and self.is_needed(use, config)]

    def differences(self, config: RunConfig, at: Collection[At]) -> list[Finding]:
        """What those processes need, and the installed version has otherwise."""
        if not self.is_installed:
            return []
        found = ((use, difference(use)) for use in self.needed(config, at))
        return [self._finding(use, what) for use, what in found if what]

    def replaced(self, config: RunConfig, at: Collection[At]) -> list[Finding]:
        """What other code of this process has put in the place of what it needs; imports it."""
        if not self.is_installed:
            return []
        found = ((use, _foreign_origin(use.target)) for use in self.needed(config, at))
        return [
            self._finding(use, f"is replaced in this process, by {origin}")
            for use, origin in found
            if origin
        ]

    def _finding(self, use: Use, what: str) -> Finding:
        read_in = ", ".join(self.read_in)
        known = f"it is {use.how} by trainctl, which was written for {self.package} {read_in}"
        return Finding(
            rule=RULE,
            key=use.need.key,
            message=f"{use.name} of {self.package} {self.version} {what}; {known}"
            + (f". So {use.fallback}" if use.fallback else ""),
            hint="" if use.fallback else f"pip install '{self.package}=={self.read_in[-1]}'",
            severity=Severity.warning if use.fallback else Severity.error,
            exit_code=ExitCode.environment,
        )


def _foreign_origin(target: str) -> str:
    """Return the file of a function that is neither of its own package nor of those that it works
    with."""
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = inspect.getattr_static(found, name, None)
        found = getattr(found, "__func__", found)  # of a class or static method
    code = getattr(inspect.unwrap(found) if callable(found) else None, "__code__", None)
    if code is None:
        return ""
    file = Path(code.co_filename)
    return "" if any(file.is_relative_to(folder) for folder in _folders()) else str(file)


def _folders() -> list[Path]:
    packages = ("trainctl", "torch", "deepspeed", "transformers", "torchao")
    return [folder for name in packages if (folder := source.package_folder(name))]


def load(reference: str) -> Callable[[], None]:
    """Return a function by ``module:name``."""
    module, _, name = reference.partition(":")
    loaded: ModuleType = importlib.import_module(module)
    function: Callable[[], None] = getattr(loaded, name)
    return function
