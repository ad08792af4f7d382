"""Reading and checking a DeepSpeed JSON, with line numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trainctl.cli.planning import compose
from trainctl.config.json_file import JsonDocument, read_json
from trainctl.config.model_directory import fill_from_directory
from trainctl.config.schema import ModelConfig
from trainctl.errors import Finding, TrainctlError
from trainctl.hardware import resolve_hardware
from trainctl.rules.deepspeed.case import JsonContext
from trainctl.rules.deepspeed_schema import Schema, load, versions
from trainctl.rules.registry import check_json


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFile:
    """A DeepSpeed JSON with its findings."""

    document: JsonDocument
    """Content with its line numbers."""
    findings: tuple[Finding, ...]
    """Findings by severity, then by line; each names its line."""
    schema: Schema
    """Schema of the DeepSpeed version it was checked against."""
    installed: str
    """Version of the installed DeepSpeed; empty if there is none."""

    @property
    def has_error(self) -> bool:
        return any(finding.is_error for finding in self.findings)


def check_file(path: Path, around: JsonContext) -> CheckedFile:
    """Read and check a DeepSpeed JSON.

    Raises:
        TrainctlError: The file cannot be read at all.
    """
    document = read_json(path)
    installed = installed_deepspeed()
    schema = load(installed if installed in versions() else None)
    found = check_json(document.value, around, schema) if document.is_readable else ()
    named = [*document.findings, *(_with_line(finding, document, path) for finding in found)]
    named.sort(key=lambda finding: (not finding.is_error, _line(finding)))
    return CheckedFile(document=document, findings=tuple(named), schema=schema, installed=installed)


def json_context(
    overrides: Sequence[str], world_size: int | None, model: Path | None
) -> JsonContext:
    """Return the devices, ranks and model for the JSON, from the command's options.

    `overrides` may hold `hardware=...` only. `world_size` is by default that of the hardware.

    Raises:
        TrainctlError: Something else is overridden, or the model cannot be read.
    """
    others = [text for text in overrides if not text.startswith(("hardware=", "hardware."))]
    if others:
        raise TrainctlError(
            f"{others[0]} has no effect on a DeepSpeed JSON",
            hint="beside --deepspeed only hardware=... says something: kind and number of devices",
        )
    nodes, devices, accelerator = 1, None, None
    if overrides:
        hardware = resolve_hardware(compose(overrides, None).config.hardware)
        nodes, devices = hardware.nodes, hardware.devices_per_node
        accelerator = hardware.accelerator
    ranks = nodes * devices if devices else None
    return JsonContext(
        world_size=world_size or ranks,
        devices_per_node=devices,
        accelerator=accelerator,
        fills_auto=True,
        model=None if model is None else _shape(model),
    )


def installed_deepspeed() -> str:
    """Return the installed DeepSpeed's version without importing it; empty if there is none."""
    try:
        return version("deepspeed").partition("+")[0]
    except PackageNotFoundError:
        return ""


def _shape(directory: Path) -> ModelConfig:
    return fill_from_directory(ModelConfig(name="hf", family="hf", path=str(directory)))


def _with_line(finding: Finding, document: JsonDocument, path: Path) -> Finding:
    line = document.line_of(finding.key)
    return finding.set_by(f"{path}:{line}" if line else str(path))


def _line(finding: Finding) -> int:
    number = finding.source.rpartition(":")[2]
    return int(number) if number.isdecimal() else 0
