"""Rules about the keys themselves, and the types and ranges of their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from trainctl.config.suggest import LONGEST, nearest
from trainctl.rules.deepspeed.case import (
    AUTO,
    HF_AUTO_KEYS,
    LITERAL_AUTO_KEYS,
    Case,
)
from trainctl.rules.deepspeed.rule import Enforcement, Problem, rule
from trainctl.rules.deepspeed.values import outside, read, shown
from trainctl.rules.deepspeed_schema import Path, Schema


@rule(
    "TC203",
    file="runtime/config_utils.py",
    fix="Write the key that was meant, or leave it out.",
)
def checked_sections_hold_known_keys(case: Case) -> Iterator[Problem]:
    """A section that DeepSpeed checks holds only keys that it has."""
    yield from _unknown_keys(case, "refused")


@rule(
    "TC204",
    file="runtime/config.py",
    meets=Enforcement.silent,
    fix="Write the key that was meant, or leave it out: it has no effect.",
)
def other_sections_hold_known_keys(case: Case) -> Iterator[Problem]:
    """A key at the top, or in a section that DeepSpeed does not check, is one that it reads."""
    yield from (each for each in _unknown_keys(case, "ignored") if not _is_foreign(case, each.key))


@rule(
    "TC433",
    file="runtime/config.py",
    meets=Enforcement.silent,
    fix="Leave the key out, or keep it for the program that reads it.",
    warns=True,
)
def keys_of_other_programs_are_known(case: Case) -> Iterator[Problem]:
    """A key at the top that resembles none of DeepSpeed's is read by another program."""
    for problem in _unknown_keys(case, "ignored"):
        if _is_foreign(case, problem.key):
            yield problem._replace(hint=_LEAVE_OUT)


@rule("TC205", file="runtime/config.py", fix="Leave the key out, or use what replaces it.")
def removed_keys_are_gone(case: Case) -> Iterator[Problem]:
    """No key is one that DeepSpeed has removed."""
    for path, _, _ in case.entries():
        name = ".".join(path)
        if name in case.schema.removed:
            instead = case.schema.removed[name]
            hint = f"use {instead}" if instead else "leave it out"
            yield Problem(name, f"{name} has been removed from DeepSpeed", hint)


@rule(
    "TC206",
    file="runtime/config_utils.py",
    meets=Enforcement.silent,
    fix="Use the key that replaces it.",
    warns=True,
)
def keys_are_not_deprecated(case: Case) -> Iterator[Problem]:
    """No key is a deprecated one."""
    for path, _, key in case.entries():
        if key is not None and key.replaced:
            lost = "" if key.sets_replacement else ", and its value is not taken over"
            name = ".".join(path)
            yield Problem(name, f"{name} is deprecated{lost}", f"use {key.replaced}")
    if isinstance(case.json.get("zero_optimization"), bool):
        stage = case.stage
        yield Problem(
            "zero_optimization",
            f"zero_optimization={shown(bool(stage))} is a deprecated form, and means stage {stage}",
            f'write "zero_optimization": {{"stage": {stage}}}',
        )


@rule("TC207", file="runtime/config_utils.py", fix="Keep the newer of the two keys.")
def one_name_for_one_setting(case: Case) -> Iterator[Problem]:
    """No setting is written twice, under a deprecated or another name and under its own."""
    written = {".".join(path) for path, _, _ in case.entries()}
    for name in sorted(written):
        key = case.schema.keys.get(name)
        if key is None or key.name == "bfloat16":
            continue
        other = key.same_as or (key.replaced if key.sets_replacement else "")
        if other and other in written:
            yield Problem(name, f"{name} and {other} are the same setting", f"leave out {name}")


@rule(
    "TC208",
    file="runtime/config.py",
    fix="Give the value: DeepSpeed itself fills nothing in.",
)
def nothing_is_left_open(case: Case) -> Iterator[Problem]:
    """No value that DeepSpeed takes as it stands is "auto"."""
    yield from _left_open(case, checked=False)


@rule(
    "TC227",
    file="runtime/config_utils.py",
    meets=Enforcement.silent,
    fix="Give the value: DeepSpeed drops the word, and takes its default.",
)
def nothing_is_dropped(case: Case) -> Iterator[Problem]:
    """No value in a section that DeepSpeed checks is "auto": it would be dropped."""
    yield from _left_open(case, checked=True)


@rule(
    "TC209",
    file="runtime/config_utils.py",
    meets=Enforcement.later,
    fix="Start it by transformers or accelerate; or give the values.",
    warns=True,
)
def others_fill_in_what_they_can(case: Case) -> Iterator[Problem]:
    """A JSON with "auto" goes through transformers or accelerate, not straight to DeepSpeed."""
    names = [name for name in autos(case) if name in HF_AUTO_KEYS]
    if names and case.around.fills_auto:
        yield Problem(
            names[0],
            f'values left at "auto" ({", ".join(names)}): the Trainer of transformers or '
            "accelerate fills them in; what depends on them is not checked here",
            "given to deepspeed.initialize as it is, the JSON fails or is misread",
        )


@rule("TC210", file="runtime/config_utils.py", fix="Write a value of the key's type.")
def checked_values_have_their_type(case: Case) -> Iterator[Problem]:
    """A value in a section that DeepSpeed checks is of its key's type."""
    yield from _wrong_types(case, checked=True)


@rule(
    "TC211",
    file="runtime/config.py",
    meets=Enforcement.later,
    fix="Write a value of the key's type.",
)
def other_values_have_their_type(case: Case) -> Iterator[Problem]:
    """A value that DeepSpeed takes as it stands is of its key's type."""
    yield from _wrong_types(case, checked=False)


@rule("TC212", file="runtime/config_utils.py", fix="Write a value in the key's range.")
def checked_values_are_in_range(case: Case) -> Iterator[Problem]:
    """A value in a section that DeepSpeed checks is in its key's range."""
    yield from _out_of_range(case, checked=True)


@rule(
    "TC213",
    file="runtime/config.py",
    meets=Enforcement.later,
    fix="Write a value in the key's range.",
)
def other_values_are_in_range(case: Case) -> Iterator[Problem]:
    """A value that DeepSpeed takes as it stands is in its key's range."""
    yield from _out_of_range(case, checked=False)


@rule(
    "TC214",
    file="runtime/config_utils.py",
    meets=Enforcement.silent,
    fix="Write numbers without quotes, and true or false.",
    warns=True,
)
def values_are_written_as_their_type(case: Case) -> Iterator[Problem]:
    """A number is written as a number, a switch as true or false."""
    for path, value, key in case.entries():
        if key is None or value == AUTO:
            continue
        reading = read(key, value)
        if reading.is_loose:
            name = ".".join(path)
            yield Problem(
                name,
                f"{name} is {shown(value)}, and is taken for {shown(reading.value)}",
                reading.hint,
            )


def suggestion(schema: Schema, path: Path) -> str:
    """Return a hint for an unknown key: a similar key of its section, or its name elsewhere."""
    *parents, name = path
    section = tuple(parents)
    inside = [known for known in schema.inside(section) if not _is_old(schema, (*section, known))]
    elsewhere = [
        known
        for known, key in schema.keys.items()
        if known.rpartition(".")[2] == name and not key.same_as and not key.replaced
    ]
    close = nearest(name, inside, count=1)
    if close:
        return f"did you mean {'.'.join((*section, close[0]))}?"
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    return _LEAVE_OUT


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


def _is_old(schema: Schema, path: Path) -> bool:
    key = schema.find(path)
    return key is not None and bool(key.same_as or key.replaced)


def _unknown_keys(case: Case, unknown: str) -> Iterator[Problem]:
    for path, _, key in case.entries():
        section = case.schema.find(path[:-1])
        meets = section.unknown if section else "ignored"
        name = ".".join(path)
        if key is None and meets == unknown and name not in case.schema.removed:
            yield Problem(name, f"DeepSpeed has no key {name}", suggestion(case.schema, path))


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
        yield Problem(name, f'{name} is "auto", {why}', _instead_of_auto(case, name))


def _instead_of_auto(case: Case, name: str) -> str:
    key = case.schema.keys.get(name)
    if key is not None and key.default is not None:
        return f"give the value; DeepSpeed's default is {shown(key.default)}"
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
                yield Problem(name, f"{name}={shown(value)} is not an object of keys")
            continue
        reading = read(key, value)
        if reading.problem:
            yield Problem(name, f"{name}: {reading.problem}", reading.hint)


def _out_of_range(case: Case, *, checked: bool) -> Iterator[Problem]:
    for path, value, key in case.entries():
        if key is None or key.checked is not checked or value == AUTO:
            continue
        problem = outside(key, read(key, value).value)
        if problem and key.name not in ELSEWHERE:
            name = ".".join(path)
            yield Problem(name, f"{name}: {problem[0]}", problem[1])


ELSEWHERE = ("fp16.loss_scale_window", "fp16.min_loss_scale", "tensor_parallel.preset_model")
"""Keys with rules of their own: their range depends on another setting or is unchecked."""
