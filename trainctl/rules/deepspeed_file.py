"""Reading and checking a DeepSpeed JSON, with line numbers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trainctl.config.json_file import JsonDocument, read_json
from trainctl.config.model_directory import fill_from_directory
from trainctl.config.schema import ModelConfig
from trainctl.errors import Finding
from trainctl.hardware import Hardware
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
    hardware: Hardware | None, world_size: int | None, model: Path | None
) -> JsonContext:
    """Return the devices, ranks and model that a JSON is for.

    Args:
        hardware: Machines that it runs on, if known.
        world_size: Number of ranks; None takes one for each device of the hardware.
        model: A transformers directory.

    Raises:
        TrainctlError: The model cannot be read.
    """
    return JsonContext(
        world_size=world_size or (hardware.world_size if hardware else None),
        devices_per_node=hardware.devices_per_node if hardware else None,
        accelerator=hardware.accelerator if hardware else None,
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
