"""Form of a checkpoint's manifest: its fields, and the values that each may hold."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]
"""Returns True if a value is well-formed for a field."""

_LARGEST = 2**63 - 1
"""Largest whole number of a field: no step, size or offset is larger."""

Block = tuple[int, int, int]
"""A shard (width, start, stop): columns [start, stop) of the flattened parameter viewed as rows of
`width` elements.
"""


def validate_manifest(manifest: Mapping[str, Any]) -> None:
    """Check every field that is read anywhere; other fields are for later versions.

    Raises:
        ValueError: A field is missing or malformed, or the fragments do not make up the parameters;
            says which.
    """
    for name, check in _FIELDS.items():
        if name not in manifest:
            raise ValueError(f"it has no {name}")
        _require(name, manifest[name], check)
    is_required = _SINCE_2 if manifest["format"] > 1 else {}
    for name, check in (_SINCE_2 | _OPTIONAL).items():
        if name in manifest or name in is_required:
            _require(name, manifest.get(name), check)
    files = [entry["name"] for entry in manifest["files"]]
    if not files or len(set(files)) < len(files):
        raise ValueError("its files are none, or one is listed twice")
    _check_fragments(manifest, set(files))
    for entry in manifest.get("buffers", []):
        if entry["file"] not in files:
            raise ValueError(f"{entry['name']} is in {entry['file']}, which is not listed")


def _require(name: str, value: Any, check: Check) -> None:
    if not check(value):
        shown = repr(value)
        raise ValueError(f"{name} is {shown if len(shown) < 60 else shown[:57] + '...'}")


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _number(value: Any) -> bool:
    if type(value) is int:
        return abs(value) <= _LARGEST
    return type(value) is float and math.isfinite(value)


def _text(value: Any) -> bool:
    """Return True for a string without control characters, which a terminal can show."""
    return type(value) is str and (value == "" or value.isprintable())


def _flag(value: Any) -> bool:
    return type(value) is bool


def _many(check: Check) -> Check:
    return lambda value: type(value) is list and all(map(check, value))


def _named(check: Check) -> Check:
    return lambda value: (
        type(value) is dict and all(map(_text, value)) and all(map(check, value.values()))
    )


def _either_none_or(*names: str) -> Check:
    """Return a check for an empty mapping, or a mapping of numbers with at least these names."""
    numbers = _named(_number)
    return lambda value: value == {} or (numbers(value) and set(names) <= value.keys())


def _states(value: Any) -> bool:
    return _many(_text)(value) and "master" in value


def _file(value: Any) -> bool:
    return (
        type(value) is dict
        and _file_name(value.get("name"))
        and _count(value.get("bytes"))
        and _text(value.get("sha256"))
    )


def _file_name(value: Any) -> bool:
    """Return True for a plain file name, which cannot lead out of its folder."""
    return _text(value) and "/" not in value and value not in ("", ".", "..")


def _fragment(value: Any) -> bool:
    return (
        type(value) is dict
        and all(_text(value.get(name)) for name in ("parameter", "file"))
        and all(_count(value.get(name)) for name in ("start", "numel", "tensor", "offset"))
        and ("shard" not in value or _shard(value["shard"]))
        and ("sides" not in value or _named(_side)(value["sides"]))
    )


def _buffer(value: Any) -> bool:
    """Return True for a model's buffer: its name, file, key and length."""
    return (
        type(value) is dict
        and all(_text(value.get(name)) for name in ("name", "file", "key"))
        and _count(value.get("numel"))
    )


def _shard(value: Any) -> bool:
    return _many(_count)(value) and len(value) == 3 and value[1] < value[2] <= value[0]


def _side(value: Any) -> bool:
    return (
        type(value) is list
        and len(value) == 3
        and _count(value[0])
        and _count(value[1])
        and _text(value[2])
    )


def _stability(value: Any) -> bool:
    """Return True for the state of spike detection: running means with counts, and counters."""
    if type(value) is not dict:
        return False
    means = [value[name] for name in ("loss", "norm") if name in value]
    counters = [value[name] for name in ("in_a_row", "bad_step") if name in value]
    return all(_many(_number)(mean) and len(mean) == 2 for mean in means) and all(
        map(_number, counters)
    )


def _learning_rate(value: Any) -> bool:
    """Return True for changes that evaluations and rewinds made to the learning-rate schedule."""
    if type(value) is not dict:
        return False
    numbers = [value[name] for name in ("cut", "drops") if name in value]
    return all(map(_number, numbers)) and _PATIENCE(value.get("patience", {}))


def _model(value: Any) -> bool:
    return (
        type(value) is dict
        and type(value.get("configuration")) is dict
        and _text(value.get("sha256"))
    )


def _base(value: Any) -> bool:
    """Return True for the origin of frozen weights: a seed, a directory, or a checkpoint."""
    if type(value) is not dict:
        return False
    if value.get("kind") == "seed":
        return _count(value.get("seed")) and _text(value.get("sha256", ""))
    if not _text(value.get("path")) or value.get("kind") not in ("directory", "checkpoint"):
        return False
    if value["kind"] == "checkpoint":
        return _text(value.get("sha256"))
    return _named(_digested)(value.get("files"))


def _digested(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and _count(value[0]) and _text(value[1])


_PATIENCE = _either_none_or("best", "best_step", "evaluations_since")

_FIELDS: dict[str, Check] = {
    "format": lambda value: _count(value) and value > 0,
    "step": _count,
    "samples": _count,
    "tokens": _count,
    "metrics": _named(_number),
    "corpus_digest": _text,
    "shapes": _named(_many(_count)),
    "states": _states,
    "scalars": _named(_number),
    "files": _many(_file),
    "fragments": _many(_fragment),
}
_SINCE_2: dict[str, Check] = {"run": _text, "model": _model, "weights_only": _flag}
_OPTIONAL: dict[str, Check] = {
    "trainctl": _text,
    "attempt": _count,
    "kept_for": _text,
    "patience": _PATIENCE,
    "source_digests": _named(_text),
    "layout": _named(_count),
    "loss_scale": _either_none_or("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"),
    "stability": _stability,
    "divergence": _either_none_or("best", "start"),
    "norms": _many(_number),
    "ema": _either_none_or("steps"),
    "learning_rate": _learning_rate,
    "buffers": _many(_buffer),
    "base": _base,
    "adapter": lambda value: type(value) is dict and all(map(_text, value)),
    "multipliers": lambda value: bool(value) and _either_none_or("output", "attention")(value),
}


def _check_fragments(manifest: Mapping[str, Any], files: set[str]) -> None:
    """Raise unless every element of every parameter is in a fragment."""
    shapes = manifest["shapes"]
    if not shapes:
        raise ValueError("it has no parameter")
    ranges: dict[str, dict[Block, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for fragment in manifest["fragments"]:
        name, start = fragment["parameter"], fragment["start"]
        if name not in shapes:
            raise ValueError(f"a fragment is of {name}, which has no shape")
        if fragment["file"] not in files:
            raise ValueError(f"{name} is in {fragment['file']}, which is not listed")
        whole = math.prod(shapes[name])
        block = tuple(fragment["shard"]) if "shard" in fragment else (whole, 0, whole)
        ranges[name][block].append((start, start + fragment["numel"]))
    for name, shape in shapes.items():
        problem = _gap(math.prod(shape), ranges.get(name, {}))
        if problem:
            raise ValueError(f"{name} is not all there: {problem}")


def _gap(numel: int, blocks: Mapping[Block, list[tuple[int, int]]]) -> str:
    """Return which part of a parameter no fragment holds; empty if fragments hold all of it."""
    if numel == 0:
        return ""
    column, rows = 0, {row for row, _, _ in blocks}
    if len(rows) != 1 or numel % (row := rows.pop()):
        return "its shards do not make it up" if blocks else "it has no fragment"
    for _, start, stop in sorted(blocks):
        if start != column:
            return "its shards do not make it up"
        column = stop
    if column != row:
        return "its shards do not make it up"
    for (_, start, stop), ranges in blocks.items():
        end = 0
        for first, last in sorted(ranges):
            if first > end:
                break
            end = max(end, last)
        if end != numel // row * (stop - start):
            return f"its elements are there up to {end:,} of {numel // row * (stop - start):,}"
    return ""
