"""Model card of an exported checkpoint: `README.md` with the hub's metadata, and the loss curve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from trainctl.config.codec import to_plain
from trainctl.config.literal_secrets import without_secrets
from trainctl.config.quantities import count_text
from trainctl.config.schema import ModelConfig, RunConfig
from trainctl.data.source_lengths import data_plan_of
from trainctl.errors import TrainctlError
from trainctl.models.directory import hub_name
from trainctl.monitor.plan_text import plan_rows, plan_title
from trainctl.monitor.report.document import PACKAGES
from trainctl.monitor.report.figure import loss_figure, save_chart
from trainctl.monitor.report.history import History
from trainctl.options.adapter import low_rank
from trainctl.plans.mixture import SINGLE_SOURCE, sources_of
from trainctl.plans.types import RunPlan
from trainctl.runs.attempts import effective_attempt
from trainctl.runs.directory import read_plan, read_record
from trainctl.runs.files import write_text
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import read_manifest
from trainctl.runs.provenance import redact_text
from trainctl.runs.records import read_events

CARD, CURVE = "README.md", "loss.png"

ROWS = ("model", "trains", "hardware", "mesh", "engine", "batch", "tokens", "run", "optimizer")
"""Rows of a plan that a card has; the others name paths of this machine."""

SECTIONS = ("objective", "optimizer", "schedule", "precision", "adapter")
"""Sections of the configuration that a card has."""

Row = Sequence[object]


def write_card(run: RunPaths, checkpoint: Path, folder: Path, *, adapter: bool = False) -> None:
    """Write the card of a checkpoint, and its curve, into the folder of its export.

    Paths of this machine are not in it: of files it has the names alone.

    Args:
        adapter: Whether the folder holds the adapter alone.
    """
    plan = read_plan(run.attempt(effective_attempt(run).number).plan)
    manifest = read_manifest(checkpoint)
    history = History(run)
    history.read()
    has_curve = len(history.steps) > 1
    if has_curve:
        save_chart(lambda: loss_figure(history), folder / CURVE, title=plan.config.model.name)
    facts = yaml.safe_dump(_metadata(plan.config, adapter=adapter), sort_keys=False)
    sections = [
        ("Training", _table(_training_rows(plan, manifest), ("", ""))),
        ("Data", _table(_data_rows(plan), ("source", "files", "tokens", "share", "epochs"))),
        ("Evaluation", _evaluation(run, manifest)),
        ("Loss", f"![training and held-out loss]({CURVE})" if has_curve else ""),
        ("Versions", _table(_versions(run), ("package", "version"))),
    ]
    lines = [f"---\n{facts}---", f"# {plan.config.model.name}", f"{plan_title(plan)}."]
    lines += [f"## {title}\n{text}" for title, text in sections if text]
    write_text(folder / CARD, redact_text("\n\n".join(lines)) + "\n")


def _metadata(config: RunConfig, *, adapter: bool) -> dict[str, Any]:
    """Return the metadata of a card, as the hub defines it (`hub-docs`, modelcard.md)."""
    model = config.model
    base = base_model(model)
    library = "trainctl" if model.is_module else "transformers"
    found = {
        "library_name": "peft" if adapter else library,
        "pipeline_tag": "text-generation",
        "license": _license(model),
        "base_model": base,
        "base_model_relation": None if base is None else "adapter" if adapter else "finetune",
        "tags": ["trainctl", *(["lora"] if low_rank(config.adapter) is not None else [])],
    }
    return {name: value for name, value in found.items() if value is not None}


def base_model(model: ModelConfig) -> str | None:
    """Return the hub's name of the model whose weights a run started from; None if unknown."""
    return None if model.initial_weights is None else hub_name(model.initial_weights)


def _license(model: ModelConfig) -> str | None:
    """Return the license that the card of the base model names."""
    try:
        text = (Path(model.initial_weights or "") / CARD).read_text(encoding="utf-8")
        facts = yaml.safe_load(text.split("---")[1])
    except (OSError, ValueError, IndexError, yaml.YAMLError):
        return None
    license_ = facts.get("license") if isinstance(facts, dict) else None
    return license_ if isinstance(license_, str) else None


def _table(rows: Iterator[Row], heads: Sequence[str]) -> str:
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    lines = [heads, ["---"] * len(heads), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if cells else ""


def _training_rows(plan: RunPlan, manifest: dict[str, Any]) -> Iterator[Row]:
    yield "checkpoint", f"step {manifest['step']:,}, after {count_text(manifest['tokens'])} tokens"
    yield from (row for row in plan_rows(plan) if row[0] in ROWS)
    for name in SECTIONS:
        values = to_plain(getattr(without_secrets(plan.config), name))
        parts = (f"{key}={value}" for key, value in values.items() if value not in (None, [], {}))
        yield name, ", ".join(parts)
    model = plan.config.model
    if model.initial_weights is not None:
        yield "base", base_model(model) or Path(model.initial_weights).name


def _data_rows(plan: RunPlan) -> Iterator[Row]:
    """Yield what the whole run draws from each source, as far as its texts are still there."""
    config = plan.config
    if not config.trains_itself:
        return
    try:
        found, _ = data_plan_of(plan)
    except TrainctlError:
        found = None
    for name, section in sources_of(config.data).items():
        paths = getattr(section, "paths", None) or [getattr(section, "url", None) or ""]
        files = ", ".join(_public_name(path) for path in paths[:3])
        files += f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
        title = section.kind if name == SINGLE_SOURCE else f"{name} ({section.kind})"
        use = None if found is None else found.run.get(name)
        numbers = ("", "", "")
        if use is not None:
            numbers = (count_text(use.tokens), f"{100 * use.share:.3g} %", f"{use.epochs:.2g}")
        yield title, files, *numbers


def _public_name(place: str) -> str:
    """Return a URL without credentials and query, and of a path its last part."""
    if "://" not in place:
        return Path(place).name
    found = urlsplit(place)
    return f"{found.scheme}://{found.hostname or ''}{found.path}"


def _evaluation(run: RunPaths, manifest: dict[str, Any]) -> str:
    """Return the checkpoint's metrics, and the results of tasks at its step."""
    rows: list[Row] = [
        (f"held-out {name}" if name == "loss" else name, f"{value:.4f}", "")
        for name, value in manifest["metrics"].items()
    ]
    for event in read_events(run.events, "tasks"):
        if event.get("step") == manifest["step"]:
            for each in event["results"]:
                error = f" ± {each['stderr']:.4f}" if each.get("stderr") is not None else ""
                shots = f"{each['shots']} shots" if each.get("shots") is not None else ""
                rows.append(
                    (f"{each['task']}, {each['metric']}", f"{each['value']:.4f}{error}", shots)
                )
    return _table(iter(rows), ("metric", "value", ""))


def _versions(run: RunPaths) -> Iterator[Row]:
    packages = read_record(run).get("packages") or {}
    return ((name, packages[name]) for name in PACKAGES if name in packages)
