"""Page of the GPU check: tables of speed and memory, the tests, and each case's profile."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_cases import CEILINGS, MEMORY
from gpu_tests import TESTS

from trainctl.train.callbacks import trace_summary
from trainctl.train.callbacks.trace_summary import Count, TraceSummary

GIB = 2**30
Result = Mapping[str, Any]

CEILING_LINES = {
    "tflops": "matrix product, bf16 (fp32 on a CPU): {:,.1f} TFLOP/s",
    "copy_gb_per_second": "copy on the device: {:,.1f} GB/s, read and written",
    "to_device_gb_per_second": "copy to the device from pinned memory: {:,.1f} GB/s",
    "launch_us": "a launch: {:.2f} us of the host",
    "python_us": "a thousand calls of a Python function: {:.1f} us",
}


def tokens_per_second(result: Result) -> tuple[float, float, float] | None:
    """Return the median, the 10th and the 90th percentile of a case's steps; None without any."""
    if not (seconds := result.get("seconds")):
        return None
    tokens = result["tokens_per_step"]
    slow, fast = max(seconds), min(seconds)
    if len(seconds) > 1:
        *_, slow = statistics.quantiles(seconds, n=10, method="inclusive")
        fast, *_ = statistics.quantiles(seconds, n=10, method="inclusive")
    return tokens / statistics.median(seconds), tokens / slow, tokens / fast


def render(results: Mapping[str, Result], *, device: str, on_gpu: bool) -> str:
    """Return the page as Markdown."""
    lines = [f"# {device}", "Written by `scripts/gpu_check.py`.", ""]
    if not on_gpu:
        lines += [
            "**No GPU here.** A model of a few megabytes on a CPU shows that the check runs "
            "through, and nothing about speed.",
            "",
        ]
    memory = {case.name for case in MEMORY}
    speed = [each for name, each in results.items() if name not in {*memory, TESTS, CEILINGS}]
    lines += _ceilings(results.get(CEILINGS))
    if speed:
        lines += ["## Speed", *_speed_table(speed), ""]
    if own := [each for name, each in results.items() if name in memory]:
        lines += ["## Memory", *_memory_table(own), ""]
    lines += _tests(results.get(TESTS))
    lines += _configurations([*results.values()])
    for each in speed:
        if each.get("profile"):
            text = trace_summary.render(_profile(each["profile"]))
            lines += [f"## Profile: {each['name']}", "```text", text.rstrip(), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def _profile(fields: Mapping[str, Any]) -> TraceSummary:
    counts = {name: Count(**fields[name]) for name in ("synchronizations", "copies_to_host")}
    return TraceSummary(**{**fields, **counts})


def _ceilings(result: Result | None) -> list[str]:
    if result is None:
        return []
    if result["problem"]:
        return ["## Ceilings", result["problem"], ""]
    texts = [form.format(result["ceilings"][name]) for name, form in CEILING_LINES.items()]
    return ["## Ceilings", *(f"- {text}" for text in texts), ""]


def _speed_table(results: Sequence[Result]) -> list[str]:
    """Return a table of speed; a letter at the begin of a name stands for the shape."""
    best: dict[str, float] = {}
    for each in results:
        if speed := tokens_per_second(each):
            shape = each["name"].split()[0]
            best[shape] = max(best.get(shape, 0.0), speed[0])
    lines = [
        "| case | tokens/s | 10 % to 90 % | predicted | MFU | of the fastest | busy | launches "
        "| waits, ms | to host | peak, GiB | planned, GiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        speed = tokens_per_second(each)
        if speed is None:
            lines.append(f"| {each['name']} | {each['problem']} {'| ' * 11}|")
            continue
        profile = each.get("profile") or {}
        has_device = profile.get("has_device")
        waits, copies = profile.get("synchronizations"), profile.get("copies_to_host")
        cells = [
            each["name"] + (f" ({each['problem']})" if each["problem"] else ""),
            f"{speed[0]:,.0f}",
            f"{speed[1]:,.0f} to {speed[2]:,.0f}",
            _predicted(each),
            _mfu(each, speed[0]),
            f"{speed[0] / best[each['name'].split()[0]]:.2f}",
            f"{profile['busy']:.0%}" if profile else "",
            f"{profile['launches']:,.0f}" if has_device else "",
            f"{waits['number']:g}, {waits['ms']:.1f}" if waits and has_device else "",
            f"{copies['number']:g}, {copies['ms']:.2f}" if copies and has_device else "",
            f"{each['peak_bytes'] / GIB:.2f}",
            _planned(each) if each["loop"] == "trainctl" else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [
        *lines,
        "",
        "*10 % to 90 %*: percentiles of the timed steps. *predicted*: the plan's time model. *of "
        "the fastest*: tokens/s over the fastest loop's with the same letter. *busy*: share of a "
        "profiled step in which the GPU works. *launches*, *waits* (synchronizations) and *to "
        "host* (copies): number a step, and milliseconds. *peak*: tensors at their most and what "
        "the driver counts outside the allocator; on a CPU the process.",
    ]


def _predicted(result: Result) -> str:
    seconds = result.get("predicted_seconds")
    is_own = result["loop"] == "trainctl"
    return f"{result['tokens_per_step'] / seconds:,.0f}" if seconds and is_own else ""


def _mfu(result: Result, speed: float) -> str:
    peak = result.get("peak_tflops")
    flops = result.get("flops_per_step", 0) / result["tokens_per_step"]
    return f"{speed * flops / peak / 1e12:.1%}" if peak else ""


def _planned(result: Result) -> str:
    low, high = result["planned_low_bytes"] / GIB, result["planned_high_bytes"] / GIB
    return f"{result['planned_bytes'] / GIB:.2f} ({low:.2f} to {high:.2f})"


def _memory_table(results: Sequence[Result]) -> list[str]:
    lines = [
        "| configuration | peak, GiB | planned, GiB | peak / planned | tokens/s | predicted |",
        "|---|---|---|---|---|---|",
    ]
    for each in results:
        speed = tokens_per_second(each)
        if speed is None:
            lines.append(f"| {each['name']} | {each['problem']} | | | | |")
            continue
        ratio = each["peak_bytes"] / each["planned_bytes"]
        lines.append(
            f"| {each['name']} | {each['peak_bytes'] / GIB:.2f} | {_planned(each)} | {ratio:.2f} "
            f"| {speed[0]:,.0f} | {_predicted(each)} |"
        )
    return lines


def _tests(result: Result | None) -> list[str]:
    if result is None:
        return []
    outcome = f"{result['passed']} passed, {result['skipped']} skipped"
    lines = ["## Tests", f"Marked `gpu`: {outcome}, {len(result['failed'])} failed.", ""]
    lines += [f"- {name}" for name in (*result["failed"], *result.get("unfinished", ()))]
    for name, text in result.get("tracebacks", {}).items():
        lines += ["", f"`{name}`", "```text", text, "```"]
    return [*lines, ""]


def _configurations(results: Sequence[Result]) -> list[str]:
    """Return the overrides of each case, and what the cases were measured with."""
    lines = ["## Configurations"]
    measured: dict[str, list[str]] = {}
    for each in results:
        if words := " ".join(each.get("options", ())):
            lines.append(f"- {each['name']}: `{words}`, by {each['loop']}")
        packages = ", ".join(f"{name} {release}" for name, release in each["versions"].items())
        measured.setdefault(f"{each['date']}, {packages}", []).append(each["name"])
    lines += [f"- {how}: {'; '.join(names)}" for how, names in measured.items()]
    return [*lines, ""]
