"""Checks of keys, types and ranges, shared by lines of files and overrides.

Arguments of a user's function, a dataclass of the user's, are checked like the keys of an option.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from typing import Any

from trainctl.config.codec import attribute_types, from_plain, to_plain
from trainctl.config.keys import (
    Leaf,
    ValueProblem,
    convert_value,
    find_leaf,
    is_removal,
    leaves,
    part_leaves,
    sections,
)
from trainctl.config.schema import GROUPS
from trainctl.config.secrets import ENVIRONMENT, SECRET_LISTS
from trainctl.config.suggest import (
    DEEPSPEED_KEYS,
    OTHER_NAMES,
    did_you_mean,
    missing_colon,
    nearest_keys,
    nearest_names,
)
from trainctl.errors import Finding, TrainctlError, describe_exception

UNKNOWN_KEY, WRONG_VALUE, OUT_OF_RANGE, REFUSED = "TC101", "TC102", "TC103", "TC104"


@dataclass(frozen=True, slots=True)
class Setting:
    """A key and value set by a file or an override."""

    path: tuple[str, ...]
    """Components of the key."""
    value: Any
    """Parsed value."""
    source: str
    """The override, or `file:line`."""
    text: str | None = None
    """Scalar as written; None for lists and mappings."""
    place: str = ""
    """`file:line` of the value, which may stand below its key; empty for an override."""

    @property
    def key(self) -> str:
        return ".".join(self.path)


def check_setting(setting: Setting) -> tuple[list[Setting], list[Finding]]:
    """Convert a setting to its key's type; return the resulting settings, and what is wrong.

    A mapping under a free-form key becomes one setting for each of its leaves. A value that
    refers to another key (`${...}`) is returned unchecked: it is checked after it is resolved.
    """
    settings, findings = _check_setting(setting)
    slip = missing_colon(setting.text or "") if findings and setting.place else None
    if slip is not None:
        message, hint = slip
        finding = replace(findings[0], message=message, hint=hint, source=setting.place)
        return settings, [finding]
    return settings, findings


def _check_setting(setting: Setting) -> tuple[list[Setting], list[Finding]]:
    refused = list(_refused_constructs(setting))
    if refused:
        return [], refused
    leaf = find_leaf(setting.path)
    if leaf is None:
        return [], [unknown_key(setting)]
    has_sections = leaf.part is not None or leaf.metadata.get("each")
    if has_sections and isinstance(setting.value, dict) and setting.value:
        return _check_each(setting)
    if has_reference(setting.value):
        if leaf.is_text_mapping and isinstance(setting.value, dict):
            return _check_each(setting)
        return [setting], []
    prefix = tuple(leaf.key.split("."))
    if len(setting.path) > len(prefix) and is_removal(setting.path, setting.value):
        return [setting], []
    tree, text = setting.value, setting.text
    for name in reversed(setting.path[len(prefix) :]):
        # The text as typed keeps 007; a quoted value is a str already, without its quotes.
        as_typed = leaf.is_text_mapping and text and not isinstance(tree, str)
        tree, text = {name: text if as_typed else tree}, None
    try:
        value = convert_value(leaf, tree, text)
    except ValueProblem as problem:
        return [], [wrong_value(setting.key, setting.source, problem)]
    if not leaf.is_mapping:
        return [replace(setting, value=value)], []
    return [
        replace(setting, path=path, value=item) for path, item in _leaves_of_tree(value, prefix)
    ], []


def _check_each(setting: Setting) -> tuple[list[Setting], list[Finding]]:
    settings: list[Setting] = []
    findings: list[Finding] = []
    for name, item in setting.value.items():
        one = replace(setting, path=(*setting.path, str(name)), value=item, text=None)
        checked, problems = check_setting(one)
        settings += checked
        findings += problems
    return settings, findings


def unknown_key(setting: Setting) -> Finding:
    """Return the finding for a key that the schema lacks, with the keys probably meant."""
    key = setting.key
    if key in leaves():
        message, hint = (
            f"{key} is written with dots in a file",
            "nest it, as `section: {key: value}`",
        )
        return Finding(rule=UNKNOWN_KEY, key=key, message=message, hint=hint, source=setting.source)
    parent = next((name for name in _parent_keys(setting.path) if name in leaves()), None)
    part = leaves()[parent].part if parent else None
    if parent and part:
        message = f"there is no key {key}"
        section = key[: len(key) - len(setting.path[-1]) - 1]
        inside = [f"{section}.{name}" for name in part_leaves(part)]
        hint = did_you_mean([near for near in nearest_keys(key, inside, ()) if near in inside])
        hint = hint or f"a section of {parent} has the keys {', '.join(part_leaves(part))}"
    elif parent:
        message, hint = f"{parent} is a single value and has no keys", f"set {parent}"
        if key.rpartition(".")[2] in OTHER_NAMES:
            hint = did_you_mean(nearest_keys(key, leaves(), GROUPS))
    elif key in sections():
        inside = [name for name in leaves() if name.startswith(f"{key}.")]
        message, hint = f"{key} is a section", f"set a key of it, such as {', '.join(inside[:4])}"
        if key in GROUPS and isinstance(setting.value, (str, int)):
            option = setting.value if not str(setting.value).isdigit() else f'"{setting.value}"'
            hint = f"choose an option in the defaults list: `- override /{key}: {option}`"
    else:
        message = f"there is no key {key}"
        hint = did_you_mean(nearest_keys(key, leaves(), GROUPS))
        if setting.path[0] in DEEPSPEED_KEYS:
            own = f"DeepSpeed's own keys are set as deepspeed.{key}"
            hint = f"{hint} {own}" if hint else own
        hint = hint or "`trainctl config show` lists the keys"
    return Finding(rule=UNKNOWN_KEY, key=key, message=message, hint=hint, source=setting.source)


def has_reference(value: Any) -> bool:
    """Whether a value, or a part of it, contains a reference (`${...}`)."""
    return any("${" in text for text in _texts_in(value))


def _refused_constructs(setting: Setting) -> Iterator[Finding]:
    """Find constructs that Hydra has and trainctl refuses."""
    names = (*setting.path, *_mapping_keys(setting.value))
    if "_target_" in names:
        yield Finding(
            rule=REFUSED,
            key=setting.key,
            message="_target_ is refused: a configuration never names code to run",
            hint="choose an option of a group instead",
            source=setting.source,
        )
    if any("${hydra:" in text.replace(" ", "") for text in _texts_in(setting.value)):
        yield Finding(
            rule=REFUSED,
            key=setting.key,
            message="${hydra:...} has no value here: Hydra only composes the configuration",
            hint="refer to a key, as ${training.steps}, or to ${oc.env:NAME}",
            source=setting.source,
        )


def wrong_value(key: str, source: str, problem: ValueProblem) -> Finding:
    """Return the finding for a value that its key does not accept."""
    is_variable = f"{key}.".startswith(f"{ENVIRONMENT}.")
    message, hint = problem.message, problem.hint
    if is_variable:  # the value may be a secret: do not show it
        message = "this is no mapping of names to texts"
    if key in SECRET_LISTS:
        message, hint = "this is no list of texts", "write it as ['${oc.env:NAME}']"
    return Finding(
        rule=OUT_OF_RANGE if problem.out_of_range else WRONG_VALUE,
        key=key,
        message=message,
        hint=hint,
        source=source,
    )


def _parent_keys(path: tuple[str, ...]) -> Iterator[str]:
    for length in range(1, len(path)):
        yield ".".join(path[:length])


def _leaves_of_tree(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from _leaves_of_tree(value, (*path, name))
    else:
        yield path, tree


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts_in(item)


def _mapping_keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield str(name)
            yield from _mapping_keys(item)
    elif isinstance(value, list):
        for item in value:
            yield from _mapping_keys(item)


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
