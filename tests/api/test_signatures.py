"""The public names and their signatures are those of a file, so that a change of them is seen.

`TRAINCTL_UPDATE_GOLDEN=1` writes the file anew; a change that breaks callers needs a new version.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trainctl
from trainctl import api

FILE = Path(__file__).parent / "signatures.txt"
UNSTABLE = {"details"}
"""Attributes that are documented as no part of the API."""


class Annotation(str):
    """Annotation that is shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def signature(function: Any) -> str:
    found = inspect.signature(function)
    parameters = [
        each
        if each.annotation is each.empty
        else each.replace(annotation=Annotation(each.annotation))
        for each in found.parameters.values()
    ]
    returned = found.return_annotation
    if returned is not found.empty:
        returned = Annotation(returned)
    return str(found.replace(parameters=parameters, return_annotation=returned))


def members(name: str, cls: type) -> Iterator[str]:
    """Yield the public attributes and methods that a class defines itself."""
    fields = getattr(cls, "__dataclass_fields__", {})
    own = vars(cls).get("__init__")
    is_made = own is not None and not fields and not (own.__doc__ or "").startswith("Made by")
    yield f"{name}{signature(own).replace(' -> None', '')}" if is_made else f"class {name}"
    typed = vars(cls).get("__annotations__", {})
    public = sorted({*vars(cls), *typed})
    for each in (one for one in public if not one.startswith("_") and one not in UNSTABLE):
        value = inspect.getattr_static(cls, each, None)
        if isinstance(value, property):
            yield f"{name}.{each}: {value.fget.__annotations__['return']}"
        elif each in typed:
            yield f"{name}.{each}: {typed[each]}"
        elif callable(getattr(value, "__func__", value)):
            yield f"{name}.{each}{signature(getattr(value, '__func__', value))}"


def test_public_names_have_the_signatures_of_the_file() -> None:
    lines = []
    for name in sorted(set(api.__all__)):
        value = getattr(api, name)
        lines += members(name, value) if inspect.isclass(value) else [f"{name}{signature(value)}"]
    text = "\n".join(lines) + "\n"
    if os.environ.get("TRAINCTL_UPDATE_GOLDEN"):
        FILE.write_text(text)
    assert text == FILE.read_text(), "TRAINCTL_UPDATE_GOLDEN=1 accepts it"


def test_the_package_exports_names_of_the_api_lazily() -> None:
    exported = set(trainctl.__all__)
    assert exported - {"__version__"} <= set(api.__all__)
    assert exported <= set(dir(trainctl))
    assert all(getattr(trainctl, name) is getattr(api, name) for name in exported - {"__version__"})


def test_every_public_name_has_a_docstring() -> None:
    missing = [
        f"{name}.{each}"
        for name in api.__all__
        if inspect.isclass(cls := getattr(api, name)) and cls.__module__ == api.__name__
        for each, value in vars(cls).items()
        if not each.startswith("_")
        and (isinstance(value, property) or inspect.isfunction(value))
        and not inspect.getdoc(value)
    ]
    assert not missing
    assert all(getattr(api, name).__doc__ for name in api.__all__)
