"""Arguments of a user's function: a dataclass of the user's, checked like the keys of an option."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from trainctl.config.check import UNKNOWN_KEY, wrong_value
from trainctl.config.codec import attribute_types, from_plain, to_plain
from trainctl.config.keys import Leaf, ValueProblem, convert_value
from trainctl.config.suggest import did_you_mean, nearest_names
from trainctl.errors import Finding, TrainctlError, describe_exception


def arguments_class(function: Callable[..., Any], named: str) -> type | None:
    """Return the dataclass that a function takes; None for a function without parameters.

    It is the function's attribute `arguments`, or else the annotation of its first parameter.

    Args:
        named: Key and reference of the function, for messages.

    Raises:
        TrainctlError: The function takes a parameter that no dataclass describes.
    """
    found = getattr(function, "arguments", None)
    if isinstance(found, type) and is_dataclass(found):
        return found
    try:
        parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    except (NameError, TypeError, ValueError, SyntaxError) as error:
        raise TrainctlError(f"{named}: its parameters: {describe_exception(error)}") from None
    if not parameters:
        return None
    found = parameters[0].annotation
    if isinstance(found, type) and is_dataclass(found):
        return found
    raise TrainctlError(
        f"{named}: no dataclass declares its parameter {parameters[0].name}",
        hint="annotate it: @dataclass class Sizes: width: int = 64, and def model(sizes: Sizes)",
    )


def check_arguments(cls: Any, given: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return all arguments of a function as plain data, with defaults for those not given.

    Args:
        cls: Dataclass of the arguments; None for a function without any.
        prefix: Section of the arguments in the configuration, such as `model.arguments`.

    Raises:
        TrainctlError: With a finding for each that is unknown, missing or of another type.
    """
    known = {item.name: item for item in fields(cls) if item.init} if cls is not None else {}
    found: dict[str, Any] = {}
    findings = [_unknown(name, known, prefix) for name in given if name not in known]
    for name, item in known.items():
        try:
            found[name] = _value(cls, item, given, prefix)
        except ValueProblem as problem:
            findings.append(wrong_value(f"{prefix}.{name}", "", problem))
    if findings:
        raise TrainctlError.from_findings(findings)
    return found


def _unknown(name: str, known: Mapping[str, Any], prefix: str) -> Finding:
    close = [f"{prefix}.{each}" for each in nearest_names(name, known)]
    legal = f"the function takes {', '.join(known) or 'no arguments'}"
    return Finding(
        rule=UNKNOWN_KEY,
        key=f"{prefix}.{name}",
        message=f"there is no key {prefix}.{name}",
        hint=f"{did_you_mean(close)} {legal}".strip(),
    )


def _value(cls: Any, item: Field[Any], given: Mapping[str, Any], prefix: str) -> Any:
    """Return the given value of an argument, or its default, as plain data."""
    default: Any = item.default_factory() if item.default_factory is not MISSING else item.default
    key, hint = f"{prefix}.{item.name}", attribute_types(cls)[item.name]
    if item.name not in given:
        if default is MISSING:
            raise ValueProblem("it has no default, and is not set", f"{key}=...")
        return to_plain(default)
    shown = None if default is MISSING else to_plain(default)
    try:
        return convert_value(Leaf(key, hint, shown, item.metadata), given[item.name])
    except (KeyError, TypeError):  # a type that no configuration can hold
        words = getattr(hint, "__name__", str(hint))
        raise ValueProblem(
            f"its type {words} cannot be set", "bool, int, float, str, an Enum, or a list of them"
        ) from None


def call_function(function: Callable[..., Any], given: Mapping[str, Any], named: str) -> Any:
    """Call a function with its arguments, given as plain data.

    Raises:
        TrainctlError: The function, as it is now, takes others.
    """
    cls = arguments_class(function, named)
    complete = check_arguments(cls, given, "model.arguments")
    return function() if cls is None else function(from_plain(cls, complete, "model.arguments"))
