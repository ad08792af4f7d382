"""Summary of a torch profiler trace in the Chrome format: where the time of a step goes. No torch.

On a GPU the work is what its streams executed, classified by the kernel and by the operations that
launched it. In a trace without a GPU the work is each operation's own time on the host.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

TOP_KERNELS = 12
LONGEST_GAPS = 5
NAME_WIDTH = 90
"""Kernel names are C++ templates of hundreds of characters; their beginning tells them apart."""

STEP_MARK = "ProfilerStep#"
"""Name of torch's annotation around each profiled step."""
DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
CALL_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver"})
HOST_CATEGORIES = CALL_CATEGORIES | {"cpu_op", "user_annotation"}

LAUNCH = re.compile(r"(cuda|cu|hip)\w*Launch(Cooperative)?Kernel|(cuda|hip)GraphLaunch")
WAIT = re.compile(r"(cuda|cu|hip)(Stream|Device|Event|Ctx)Synchronize|(cuda|hip)Memcpy$")
TO_HOST = re.compile(r"Memcpy DtoH|CopyDeviceToHost")

CLASSES: tuple[tuple[str, str, str], ...] = (
    ("communication", r"nccl|rccl", r"c10d::|nccl:|gloo:|_c10d_functional::"),
    ("optimizer", r"FusedAdam|fused_adam", r"Optimizer\.step#|_foreach_norm|clip_grad|_amp_"),
    ("attention", r"flash|fmha|sdpa|attention", r"attention|attn|ScaledDotProduct"),
    (
        "products",
        r"gemm|gemv|nvjet|xmma|cutlass|splitK|triton_(tem_fused\w*mm|mm)|scaled_mm|"
        r"aten::(_?addmm|mm|bmm|baddbmm|dot|mv|_?grouped_mm|_scaled_mm)$|mkldnn_linear",
        r"$^",
    ),
    (
        "cross entropy",
        r"cross_entropy|log_softmax|nll_loss",
        r"cross_?entropy|log_?softmax|nll_?loss",
    ),
    ("copies", r"^Memcpy|^Memset|^aten::_?copy_", r"$^"),
)
"""Classes in the order in which they are tried: name, pattern of the kernel, pattern of an
operation around its launch.
"""
REST = "elementwise"
"""Class of all other work: norms, activations, sums, conversions."""

_ATTENTION = re.compile(
    r"aten::_scaled_dot_product_(?P<sdpa>\w+?)_attention(?:_for_cpu)?$|"
    r"aten::_scaled_dot_product_attention_(?P<math>math)(?:_for_mps)?$|"
    r"(?P<varlen>torch_attn::_varlen_attn\w*)$|"
    r"(?P<package>FlashAttn\w*Func|flash_attn(?:_\d)?::\w+forward)$|(?P<flex>flex_attention)$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Number of events in a step, and their milliseconds."""

    number: float = 0.0
    ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """Time and events of a profiled step; counts and milliseconds are means of a step."""

    steps: int
    ms: float
    """Duration of a step."""
    has_device: bool
    """Whether the trace has work of a GPU. If not, kernels are operations on the host."""
    busy: float
    """Share of the time in which the GPU works, or an operation runs on the host: 0 to 1."""
    kernels: float
    launches: float
    """Calls that launch kernels; fewer than kernels with CUDA graphs."""
    synchronizations: Count
    """Calls in which the host waits for the GPU."""
    waiting_operations: dict[str, float]
    """Number of these calls, by the operation that makes them; the most frequent ones."""
    copies_to_host: Count
    classes: dict[str, float]
    """Milliseconds by class of work."""
    top: list[tuple[str, str, float, float]]
    """Kernels with the most time: name, class, number, milliseconds."""
    gaps: list[tuple[float, str]]
    """Longest times in which the GPU is idle: milliseconds, and what the host does."""
    attention: list[str]
    """Implementations of attention that ran."""


@dataclass(slots=True, eq=False)
class _Event:
    """A complete event of the trace; times are in microseconds."""

    name: str
    category: str
    start: float
    end: float
    thread: Any
    correlation: Any
    parent: _Event | None = None
    own: float = field(default=0.0)
    """Time outside nested events."""

    @property
    def duration(self) -> float:
        return self.end - self.start

    def around(self) -> Iterator[_Event]:
        """Yield the events that this one is nested in, from the inside."""
        event = self.parent
        while event is not None:
            yield event
            event = event.parent

    def overlap(self, start: float, end: float) -> float:
        return max(0.0, min(self.end, end) - max(self.start, start))


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of an exported trace, compressed or not.

    Raises:
        ValueError: The file is no trace.
    """
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list):
        raise ValueError(f"{path} has no list of events")
    return events


def summarize(events: Iterable[dict[str, Any]], steps: int) -> TraceSummary:
    """Summarize the events of a trace.

    Args:
        steps: Number of optimizer steps that were recorded.
    """
    read = [
        _Event(
            name=str(event.get("name", "")),
            category=event["cat"],
            start=event["ts"],
            end=event["ts"] + event.get("dur", 0),
            thread=(event.get("pid"), event.get("tid")),
            correlation=event.get("args", {}).get("correlation"),
        )
        for event in events
        if event.get("ph") == "X" and event.get("cat") in HOST_CATEGORIES | DEVICE_CATEGORIES
    ]
    host = _nest([event for event in read if event.category in HOST_CATEGORIES])
    device = [event for event in read if event.category in DEVICE_CATEGORIES]
    _attach_to_launches(device, host)
    operations = [event for event in host if event.category == "cpu_op"]
    work = device or operations
    start, end = _window(host, device)
    idle = _idle_times(work, start, end)
    calls = [event for event in host if event.category in CALL_CATEGORIES]
    waits = [event for event in calls if WAIT.match(event.name)]
    by_operation = Counter(_operation_around(event) for event in waits)
    classes, top = _by_class(work, steps, has_device=bool(device))
    return TraceSummary(
        steps=steps,
        ms=(end - start) / 1e3 / steps,
        has_device=bool(device),
        busy=1 - sum(b - a for a, b in idle) / max(end - start, 1e-9),
        kernels=sum(event.category != "gpu_memcpy" for event in work) / steps,
        launches=sum(bool(LAUNCH.match(event.name)) for event in calls) / steps,
        synchronizations=_count(waits, steps),
        waiting_operations={name: n / steps for name, n in by_operation.most_common(4)},
        copies_to_host=_count([event for event in device if TO_HOST.search(event.name)], steps),
        classes=classes,
        top=top,
        gaps=[
            ((b - a) / 1e3, _host_activity(host, a, b))
            for a, b in sorted(idle, key=lambda gap: gap[0] - gap[1])[:LONGEST_GAPS]
        ],
        attention=_attention(operations),
    )


def _nest(events: list[_Event]) -> list[_Event]:
    """Sort the events by thread and time, and set each one's parent and own time."""
    events.sort(key=lambda event: (str(event.thread), event.start, -event.end))
    around: list[_Event] = []
    for event in events:
        while around and (around[-1].thread != event.thread or around[-1].end <= event.start):
            around.pop()
        event.own = event.duration
        if around:
            event.parent = around[-1]
            event.parent.own -= event.overlap(event.parent.start, event.parent.end)
        around.append(event)
    return events


def _attach_to_launches(device: Sequence[_Event], host: Sequence[_Event]) -> None:
    """Make the call that launched a kernel its parent."""
    calls = {event.correlation: event for event in host if event.category in CALL_CATEGORIES}
    for event in device:
        event.own = event.duration
        if event.correlation is not None:
            event.parent = calls.get(event.correlation)


def _window(host: Sequence[_Event], device: Sequence[_Event]) -> tuple[float, float]:
    """Return begin and end of the recorded steps, up to the end of the work they launched."""
    marks = [event for event in host if event.name.startswith(STEP_MARK)]
    spans = marks or [*host, *device]
    if not spans:
        return 0.0, 0.0
    ends = [event.end for event in (*spans, *device)]
    return min(event.start for event in spans), max(ends)


def _idle_times(work: Iterable[_Event], start: float, end: float) -> list[tuple[float, float]]:
    """Return the times between `start` and `end` in which nothing of the work runs."""
    idle, reached = [], start
    for event in sorted(work, key=lambda event: event.start):
        if event.start > reached:
            idle.append((reached, min(event.start, end)))
        reached = max(reached, event.end)
        if reached >= end:
            return idle
    if end > reached:
        idle.append((reached, end))
    return idle


def _by_class(
    work: Sequence[_Event], steps: int, *, has_device: bool
) -> tuple[dict[str, float], list[tuple[str, str, float, float]]]:
    """Return the milliseconds of a step by class, and the kernels with the most time."""
    classes: Counter[str] = Counter()
    kernels: dict[tuple[str, str], list[float]] = {}
    for event in work:
        own = event.duration if has_device else event.own
        kind = classify(event.name, (outer.name for outer in event.around()))
        classes[kind] += own / 1e3 / steps  # type: ignore[assignment]
        totals = kernels.setdefault((event.name, kind), [0.0, 0.0])
        totals[0] += 1 / steps
        totals[1] += own / 1e3 / steps
    most = sorted(kernels.items(), key=lambda kernel: -kernel[1][1])[:TOP_KERNELS]
    return dict(classes.most_common()), [
        (_shorten(name), kind, number, ms) for (name, kind), (number, ms) in most
    ]


def classify(kernel: str, around: Iterable[str]) -> str:
    """Return the class of a kernel, or of an operation in a trace without a GPU.

    Args:
        around: Names of the operations around its launch.
    """
    found = min(_first_class(kernel, 1), *(_first_class(name, 2) for name in (kernel, *around)))
    return CLASSES[found][0] if found < len(CLASSES) else REST


@cache
def _first_class(name: str, column: int) -> int:
    """Return the index of the first class with a pattern in that column that fits the name."""
    fits = (n for n, row in enumerate(CLASSES) if re.search(row[column], name, re.IGNORECASE))
    return next(fits, len(CLASSES))


def _shorten(name: str) -> str:
    for noise in ("void ", "(anonymous namespace)::", "at::native::", "at_cuda_detail::"):
        name = name.replace(noise, "")
    return name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 1]}…"


def _count(events: Sequence[_Event], steps: int) -> Count:
    ms = sum(event.duration for event in events) / 1e3 / steps
    return Count(number=len(events) / steps, ms=ms)


def _operation_around(event: _Event) -> str:
    """Return the innermost operation that a call belongs to."""
    names = [outer.name for outer in event.around() if not outer.name.startswith(STEP_MARK)]
    return _shorten(names[0]) if names else "Python"


def _host_activity(host: Sequence[_Event], start: float, end: float) -> str:
    """Describe what the host does between two times."""
    own: dict[_Event, float] = {}
    for event in host:
        overlap = event.overlap(start, end)
        if overlap > 0 and not event.name.startswith(STEP_MARK):
            own[event] = overlap
            if event.parent in own:
                own[event.parent] -= overlap
    half, busiest = (end - start) / 2, max(own, key=lambda event: own[event], default=None)
    if busiest is not None and own[busiest] > half:
        outer = [each.name for each in busiest.around() if not each.name.startswith(STEP_MARK)]
        return " in ".join(_shorten(name) for name in (busiest.name, *outer[:2]))
    operations = [event for event in host if event.category == "cpu_op"]
    inside = [event for event in operations if event in own]
    if sum(own[event] for event in inside) > half:
        first = min(inside, key=lambda event: event.start)
        return f"{len(inside)} operations, the first is {_shorten(first.name)}"
    before = [event for event in operations if event.end <= start + 1]
    after = [event for event in operations if event.start > start]
    texts = ["Python"]
    if before:
        last = max(before, key=lambda event: (event.end, event.duration))
        texts.append(f"after {_shorten(last.name)}")
    if after:
        texts.append(f"before {_shorten(min(after, key=lambda event: event.start).name)}")
    return " ".join(texts)


def _attention(operations: Iterable[_Event]) -> list[str]:
    """Return the implementations of attention among the operations."""
    found = set()
    for name in {event.name for event in operations}:
        match = _ATTENTION.match(name)
        if match is not None and match.lastgroup is not None:
            kind = match.lastgroup
            found.add(f"sdpa {match[kind]}" if kind == "sdpa" else _ATTENTION_NAMES[kind])
    return sorted(found)


_ATTENTION_NAMES = {
    "math": "sdpa math",
    "varlen": "variable length",
    "package": "flash-attn package",
    "flex": "flex",
}


def render(summary: TraceSummary) -> str:
    """Return the summary as text."""
    waits, copies = summary.synchronizations, summary.copies_to_host
    what = "the GPU is busy" if summary.has_device else "operations run (no GPU in the trace)"
    lines = [
        f"{summary.ms:.1f} ms a step over {summary.steps} steps; {what} {summary.busy:.0%} of it",
        f"attention: {', '.join(summary.attention) or 'none seen'}",
    ]
    if summary.has_device:
        callers = ", ".join(
            f"{name} {number:g}" for name, number in summary.waiting_operations.items()
        )
        lines += [
            f"{summary.launches:,.0f} launches and {summary.kernels:,.0f} kernels a step",
            f"{waits.number:g} synchronizations a step, {waits.ms:.2f} ms"
            + (f": {callers}" if callers else ""),
            f"{copies.number:g} copies to the host a step, {copies.ms:.2f} ms",
        ]
    else:
        lines.append(f"{summary.kernels:,.0f} operations a step")
    total = sum(summary.classes.values()) or 1.0
    lines += ["", "ms a step by class"]
    lines += [f"{ms:10.2f} {ms / total:4.0%}  {name}" for name, ms in summary.classes.items()]
    lines += ["", f"ms a step and number of the top {len(summary.top)}"]
    lines += [f"{ms:10.2f} {number:8g}  {name} [{kind}]" for name, kind, number, ms in summary.top]
    lines += ["", f"the {len(summary.gaps)} longest gaps, ms"]
    lines += [f"{ms:10.2f}  {activity}" for ms, activity in summary.gaps]
    return "\n".join(lines) + "\n"
