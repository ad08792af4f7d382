"""Rules about the keys themselves, and the types and ranges of their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from trainctl.config.suggest import LONGEST, nearest_names
from trainctl.rules.deepspeed.case import (
    AUTO,
    HF_AUTO_KEYS,
    LITERAL_AUTO_KEYS,
    Case,
    JsonContext,
    json_text,
    outside,
    read_value,
)
from trainctl.rules.deepspeed_schema import Path, Schema
from trainctl.rules.rule import LEFT_OUT, WARNING, Problem, rule


@rule("TC203", "*", refused="runtime/config_utils.py", example={"fp16.loss_scale_windw": 10})
def checked_sections_hold_known_keys(case: Case) -> Iterator[Problem]:
    """Sections that DeepSpeed validates contain known keys only.

    Fix: Write the key that was meant, or leave it out.
    """
    yield from _unknown_keys(case, "refused")


@rule("TC204", "*", silent="runtime/config.py", example={"gradient_cliping": 0.5})
def other_sections_hold_known_keys(case: Case) -> Iterator[Problem]:
    """Keys at the top level, and in sections that DeepSpeed does not validate, are keys that it
    reads.

    Any other key has no effect.

    Fix: Write the key that was meant, or leave it out: it has no effect.
    """
    yield from (each for each in _unknown_keys(case, "ignored") if not _is_foreign(case, each.key))


@rule(
    "TC433",
    "*",
    severity=WARNING,
    silent="runtime/config.py",
    example={"my_own_tool": {"verbose": True}},
)
def keys_of_other_programs_are_known(case: Case) -> Iterator[Problem]:
    """Keys at the top level that resemble no key of DeepSpeed belong to another program.

    Fix: Leave the key out, or keep it for the program that reads it.
    """
    for problem in _unknown_keys(case, "ignored"):
        if _is_foreign(case, problem.key):
            yield problem._replace(hint=_LEAVE_OUT)


@rule("TC205", "*", refused="runtime/config.py", example={"amp": {"enabled": True}})
def removed_keys_are_gone(case: Case) -> Iterator[Problem]:
    """No key has been removed from DeepSpeed.

    Fix: Leave the key out, or use what replaces it.
    """
    for path, _, _ in case.entries():
        name = ".".join(path)
        if name in case.schema.removed:
            instead = case.schema.removed[name]
            hint = f"use {instead}" if instead else "leave it out"
            yield Problem(f"{name} has been removed from DeepSpeed", hint, key=name)


@rule(
    "TC206",
    "zero_optimization",
    "*",
    severity=WARNING,
    silent="runtime/config_utils.py",
    example={
        "zero_optimization.stage": 2,
        "zero_optimization.cpu_offload": True,
        "zero_optimization.offload_optimizer": LEFT_OUT,
    },
)
def keys_are_not_deprecated(case: Case) -> Iterator[Problem]:
    """No key is deprecated.

    Fix: Use the key that replaces it.
    """
    for path, _, key in case.entries():
        if key is not None and key.replaced:
            lost = "" if key.sets_replacement else ", and its value is not taken over"
            name = ".".join(path)
            yield Problem(f"{name} is deprecated{lost}", f"use {key.replaced}", key=name)
    if isinstance(case.json.get("zero_optimization"), bool):
        stage = case.stage
        yield Problem(
            f"zero_optimization={json_text(bool(stage))} is a deprecated form, "
            f"and means stage {stage}",
            f'write "zero_optimization": {{"stage": {stage}}}',
        )


@rule(
    "TC207",
    "*",
    refused="runtime/config_utils.py",
    example={
        "zero_optimization.stage": 2,
        "zero_optimization.cpu_offload": True,
        "zero_optimization.offload_optimizer": {"device": "cpu", "pin_memory": False},
    },
)
def one_name_for_one_setting(case: Case) -> Iterator[Problem]:
    """No setting is given twice, under two of its names.

    The names are those of a deprecated key, or another spelling, and the key's own.

    Fix: Keep the newer of the two keys.
    """
    written = {".".join(path) for path, _, _ in case.entries()}
    for name in sorted(written):
        key = case.schema.keys.get(name)
        if key is None or key.name == "bfloat16":
            continue
        other = key.same_as or (key.replaced if key.sets_replacement else "")
        if other and other in written:
            yield Problem(f"{name} and {other} are the same setting", f"leave out {name}", key=name)


@rule("TC208", "*", refused="runtime/config.py", example={"train_batch_size": "auto"})
def nothing_is_left_open(case: Case) -> Iterator[Problem]:
    """No value that DeepSpeed uses unchecked is "auto".

    Fix: Give the value: DeepSpeed itself fills nothing in.
    """
    yield from _left_open(case, checked=False)


@rule(
    "TC227",
    "*",
    silent="runtime/config_utils.py",
    example={"zero_optimization.reduce_bucket_size": "auto"},
)
def nothing_is_dropped(case: Case) -> Iterator[Problem]:
    """No value in a section that DeepSpeed validates is "auto".

    DeepSpeed drops the value, and its default holds.

    Fix: Give the value: DeepSpeed drops the word, and takes its default.
    """
    yield from _left_open(case, checked=True)


@rule(
    "TC209",
    "*",
    severity=WARNING,
    later="runtime/config_utils.py",
    example={"train_batch_size": "auto"},
    around=JsonContext(fills_auto=True),
    situation="Read by transformers' Trainer, which fills in the value",
)
def others_fill_in_what_they_can(case: Case) -> Iterator[Problem]:
    """A JSON with "auto" is given to transformers or accelerate, not to DeepSpeed itself.

    Fix: Start it by transformers or accelerate; or give the values.
    """
    names = [name for name in autos(case) if name in HF_AUTO_KEYS]
    if names and case.around.fills_auto:
        yield Problem(
            f'values left at "auto" ({", ".join(names)}): the Trainer of transformers or '
            "accelerate fills them in; what depends on them is not checked here",
            "given to deepspeed.initialize as it is, the JSON fails or is misread",
            key=names[0],
        )


@rule(
    "TC210",
    "*",
    refused="runtime/config_utils.py",
    example={"zero_optimization.reduce_bucket_size": "5e8"},
)
def checked_values_have_their_type(case: Case) -> Iterator[Problem]:
    """Values in sections that DeepSpeed validates have the type of their key.

    Fix: Write a value of the key's type.
    """
    yield from _wrong_types(case, checked=True)


@rule("TC211", "*", later="runtime/config.py", example={"train_batch_size": "4"})
def other_values_have_their_type(case: Case) -> Iterator[Problem]:
    """Values that DeepSpeed uses unchecked have the type of their key.

    Fix: Write a value of the key's type.
    """
    yield from _wrong_types(case, checked=False)


@rule("TC212", "*", refused="runtime/config_utils.py", example={"zero_optimization.stage": 4})
def checked_values_are_in_range(case: Case) -> Iterator[Problem]:
    """Values in sections that DeepSpeed validates are in the range of their key.

    Fix: Write a value in the key's range.
    """
    yield from _out_of_range(case, checked=True)


@rule("TC213", "*", later="runtime/config.py", example={"communication_data_type": "fp8"})
def other_values_are_in_range(case: Case) -> Iterator[Problem]:
    """Values that DeepSpeed uses unchecked are in the range of their key.

    Fix: Write a value in the key's range.
    """
    yield from _out_of_range(case, checked=False)


@rule(
    "TC214",
    "*",
    severity=WARNING,
    silent="runtime/config_utils.py",
    example={"zero_optimization.stage": 2, "zero_optimization.reduce_bucket_size": "500000"},
)
def values_are_written_as_their_type(case: Case) -> Iterator[Problem]:
    """Numbers are written as numbers, and switches as true or false.

    Fix: Write numbers without quotes, and true or false.
    """
    for path, value, key in case.entries():
        if key is None or value == AUTO:
            continue
        reading = read_value(key, value)
        if reading.is_loose:
            name = ".".join(path)
            yield Problem(
                f"{name} is {json_text(value)}, and is taken for {json_text(reading.value)}",
                reading.hint,
                key=name,
            )


def suggestion(schema: Schema, path: Path) -> str:
    """Return a hint for an unknown key: a similar key of its section, or its name elsewhere."""
    *parents, name = path
    if (full := ".".join(path)) in FORMER_NAMES:
        return f"use {FORMER_NAMES[full]}, as it is called now"
    section = tuple(parents)
    inside = [
        known for known in schema.inside(section) if not _is_former_name(schema, (*section, known))
    ]
    elsewhere = [
        known
        for known, key in schema.keys.items()
        if known.rpartition(".")[2] == name and not key.same_as and not key.replaced
    ]
    close = nearest_names(name, inside, count=1)
    if close:
        return f"did you mean {'.'.join((*section, close[0]))}?"
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    return _LEAVE_OUT


FORMER_NAMES = {"aio.thread_count": "aio.intra_op_parallelism"}
"""Keys that DeepSpeed renamed without a trace of the former name in its code."""

_LEAVE_OUT = "leave it out"
TYPING_MISTAKE = 0.8
"""Similarity above which an unknown top-level key is a misspelled key of DeepSpeed."""
REMARKS = ("comment", "comments")
"""Names used for comments that resemble keys of DeepSpeed (`comet`)."""


def _is_foreign(case: Case, name: str) -> bool:
    """Return True if an unknown key is at the top level and resembles no key of DeepSpeed."""
    if "." in name or name in REMARKS:
        return "." not in name
    known = case.schema.inside(())
    is_near = get_close_matches(name.lower()[:LONGEST], known, n=1, cutoff=TYPING_MISTAKE)
    is_part = any(key.startswith(name) for key in known)
    is_elsewhere = any(key.endswith(f".{name}") for key in case.schema.keys)
    return not (is_near or is_part or is_elsewhere)


def _is_former_name(schema: Schema, path: Path) -> bool:
    key = schema.find(path)
    return key is not None and bool(key.same_as or key.replaced)


def _unknown_keys(case: Case, unknown: str) -> Iterator[Problem]:
    for path, _, key in case.entries():
        section = case.schema.find(path[:-1])
        meets = section.unknown if section else "ignored"
        name = ".".join(path)
        if key is None and meets == unknown and name not in case.schema.removed:
            yield Problem(f"DeepSpeed has no key {name}", suggestion(case.schema, path), key=name)


def autos(case: Case) -> Iterator[str]:
    """Yield the dotted names of the values left at "auto" for another program to fill in."""
    for path, value, key in case.entries():
        name = ".".join(path)
        if value == AUTO and key is not None and name not in LITERAL_AUTO_KEYS:
            yield name
    for section in ("optimizer", "scheduler"):
        block = case.json.get(section)
        params = block.get("params") if isinstance(block, Mapping) else None
        for name, value in params.items() if isinstance(params, Mapping) else ():
            if value == AUTO:
                yield f"{section}.params.{name}"


def _left_open(case: Case, *, checked: bool) -> Iterator[Problem]:
    for name in autos(case):
        key = case.schema.keys.get(name)
        is_checked = key is not None and key.checked
        is_filled = case.around.fills_auto and name in HF_AUTO_KEYS
        if is_checked is not checked or is_filled:
            continue
        known = "which only the Trainer of transformers and accelerate fill in"
        why = known if name in HF_AUTO_KEYS else "which nothing fills in"
        yield Problem(f'{name} is "auto", {why}', _instead_of_auto(case, name), key=name)


def _instead_of_auto(case: Case, name: str) -> str:
    key = case.schema.keys.get(name)
    if key is not None and key.default is not None:
        return f"give the value; DeepSpeed's default is {json_text(key.default)}"
    return "give the value"


def _wrong_types(case: Case, *, checked: bool) -> Iterator[Problem]:
    for path, value, key in case.entries():
        if key is None or key.checked is not checked or value == AUTO:
            continue
        name = ".".join(path)
        if key.is_section and value is not None and not isinstance(value, Mapping):
            takes_switch = name == "zero_optimization" and isinstance(value, bool)
            takes_switch |= name == "datastates_ckpt" and value is False
            if not takes_switch:
                yield Problem(f"{name}={json_text(value)} is not an object of keys", key=name)
            continue
        reading = read_value(key, value)
        if reading.problem:
            yield Problem(f"{name}: {reading.problem}", reading.hint, key=name)


def _out_of_range(case: Case, *, checked: bool) -> Iterator[Problem]:
    for path, value, key in case.entries():
        if key is None or key.checked is not checked or value == AUTO:
            continue
        problem = outside(key, read_value(key, value).value)
        if problem and key.name not in ELSEWHERE:
            name = ".".join(path)
            yield Problem(f"{name}: {problem[0]}", problem[1], key=name)


ELSEWHERE = ("fp16.loss_scale_window", "fp16.min_loss_scale", "tensor_parallel.preset_model")
"""Keys with rules of their own: their range depends on another setting or is unchecked."""
