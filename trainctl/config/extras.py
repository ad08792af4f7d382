"""Installed packages, and which of trainctl's extras installs one.

They are read from the installed metadata, so pyproject.toml has the only list.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata

DEVELOPMENT = ("dev", "docs", "test")
"""Extras that no message names: they are for changing trainctl."""


def package_version(name: str) -> str:
    """Return the version of a package without importing it; empty if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


@cache
def _packages_of_extras() -> dict[str, frozenset[str]]:
    """Return the normalized names of the packages of each extra."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    try:
        own = metadata.metadata("trainctl")
    except metadata.PackageNotFoundError:  # sources on the path, not installed
        return {}
    wanted = [Requirement(text) for text in own.get_all("Requires-Dist") or []]
    optional = [each for each in wanted if each.marker and not each.marker.evaluate({"extra": ""})]
    return {
        extra: frozenset(
            canonicalize_name(each.name)
            for each in optional
            if each.marker and each.marker.evaluate({"extra": extra})
        )
        for extra in own.get_all("Provides-Extra") or []
        if extra not in DEVELOPMENT
    }


def extra_of(module: str) -> str | None:
    """Return the smallest extra of trainctl that installs a module; None if no extra does."""
    extras = _packages_of_extras()
    package = module.partition(".")[0].lower().replace("_", "-")
    if package in extras:  # the module mlflow is of the package mlflow-skinny
        return package
    found = [name for name, packages in extras.items() if package in packages]
    return min(found, key=lambda name: (len(extras[name]), name), default=None)


def install_command(*modules: str) -> str:
    """Return the pip command that installs modules: by extras of trainctl, if they have all."""
    extras = {extra_of(module) for module in modules}
    if None in extras:
        return f"pip install {' '.join(modules)}"
    return f"pip install 'trainctl[{','.join(sorted(filter(None, extras)))}]'"
