"""Kind and bytes of a row's measurement, from its columns `metric`, `value`, `unit` and
`value_gib`.

A figure without counterpart in the budget is refused with the reason, and not compared with a
figure of a similar name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum

GIB = 2**30


class NotExpressible(Exception):
    """Refusal of a row that lacks information, or has a part without a term in the estimator."""


class Metric(Enum):
    """Kind of memory figure that a row measured."""

    after_step = "allocated after a step"
    peak = "peak allocated"
    reserved = "reserved"
    driver = "as the driver reports it"
    fits = "fits"
    out_of_memory = "out of memory"


RAN = re.compile(r"\bno(t|n)?[- ]oom\b|\b(without|no) (an? )?out[- ]of[- ]memory|\bfits?\b")
RAN_OUT = re.compile(
    r"\booms?\b|\bout[- ]of[- ]memory|(not|n't) fit|cuda_?oom|oom(ed|_|-)|outofmemory"
)

ANOTHER = (
    (r"\bhost\b.*mem|\bcpu\b.*(mem|ram)|\brss\b|resident set|system (memory|ram)|\bram\b", "host"),
    (r"\bdisk\b|checkpoint (file|size)|\bnvme\b", "disk"),
    (r"\bdelta\b|\bsav(ed|ings?)\b|\breduction\b|\bincrease\b|\bdifference\b|\bratio\b", "change"),
    (r"\bafter[ _](the )?(model|init|load|build|wrap|forward|backward)", "moment"),
    (r"\b(at|before|during) (init|load|start|train)", "moment"),
    (r"\bactivations?\b", "part"),
    (r"\b(model|optimizer|training)[ _]states?\b", "part"),
    (r"\b(weights?|param(eter)?s?|gradients?|states?)[ _](memory )?only\b", "part"),
    (r"\butili[sz]ation\b|\bgpu util", "share"),
)
"""Words of metrics that the estimator lacks, and the reason of refusal."""
REASONS = {
    "host": "host memory, of which no row could be checked",
    "disk": "bytes on disk",
    "change": "a difference between two runs",
    "moment": "a moment that is not one of a training step",
    "part": "one part of the memory, which an allocator does not tell apart",
    "share": "a share of the device",
}

KINDS = (
    (r"max_memory_reserved|memory_reserved|max_reserved", Metric.reserved),
    (r"mem-max-alloc|mem_max_alloc", Metric.peak),
    (r"nvml|smi\b|\bdriver\b|wandb|mem_get_info|\bvram\b(?!.*alloc)", Metric.driver),
    (r"\breserved", Metric.reserved),
    (r"after|log point|resident|static|mem-allocated|steady", Metric.after_step),
    (r"(gpu|device) mem(ory)? us(ed|age)(?!.*alloc)", Metric.driver),
    (r"peak|max|alloc|active|mem|gpu", Metric.peak),
)
"""Words of a metric, the most specific first. `max_memory_allocated after a step` is a peak."""


def metric_of(record: Mapping[str, str]) -> Metric:
    """Return the kind of figure that a row measured.

    Raises:
        NotExpressible: The row measured nothing, or nothing that the estimator predicts.
    """
    metric, value = record.get("metric", "").lower(), record.get("value", "").lower()
    text = f"{metric} {value}"
    if re.search(r"\bnot?\b[^.;]{0,12}\boom\b|didn't oom", text):
        return Metric.fits
    if RAN_OUT.search(text) and not re.search(r"\b(no|without) out[- ]of", text):
        return Metric.out_of_memory
    if RAN.search(text) or record.get("tier") == "F":
        return Metric.fits
    if not metric:
        raise NotExpressible("metric is not given")
    if "max_memory_allocated" in metric:
        return Metric.peak
    for words, kind in ANOTHER:
        if re.search(words, metric):
            raise NotExpressible(f"metric '{metric}': {REASONS[kind]}")
    for words, metric_kind in KINDS:
        if re.search(words, metric):
            return metric_kind
    raise NotExpressible(f"metric '{metric}' is not known")


PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
DECIMAL = re.compile(r"(1e|10\^|10\*\*)\d|decimal|\bsi\b")


def measured_bytes(record: Mapping[str, str]) -> float:
    """Return the measured bytes.

    `value_gib` takes precedence over `value`. GB means 2^30 bytes, as trainers print it, unless the
    unit says 10^9.

    Raises:
        NotExpressible: The value is no single positive number, or its unit is no unit of bytes.
    """
    given = record.get("value_gib", "")
    number = _number(given) if given else None
    if number is not None:
        return number * GIB
    value = record.get("value", "")
    number = _number(value)
    if number is None:
        raise NotExpressible(f"value '{value}' is no single positive number")
    unit = record.get("unit") or " ".join(re.findall(r"[A-Za-z%]+", value))
    return number * _scale(unit)


def _number(text: str) -> float | None:
    """Return the number of a text such as `~40`, `40,123` or `40.1 +- 0.2`.

    Bounds and ranges give None, since they are no measurements.
    """
    match = re.match(
        r"[~≈ ]*(?:about |ca\.? |approx\.? )?"
        r"(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?P<rest>.*)$",
        text.strip().lower(),
    )
    if not match or re.match(r"\s*(-|–|to|\.\.)\s*\d", match["rest"]):
        return None
    number = float(match[1].replace(",", ""))
    return number if number > 0 else None


def _scale(unit: str) -> float:
    text = unit.strip().lower()
    match = re.match(r"(?:(k|m|g|t)i?b?|(bytes?|b)|(kilo|mega|giga|tera)bytes?)(?![a-z])", text)
    if not match:
        raise NotExpressible(f"unit '{unit}' is no number of bytes")
    prefix = (match[1] or (match[3] or "")[:1]) if not match[2] else ""
    base = 1000 if DECIMAL.search(text) else 1024
    return float(base ** PREFIXES[prefix])
