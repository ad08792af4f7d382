"""Checks of a plan, of a DeepSpeed JSON and of its file, by every rule.

Importing `Draft` and `Case` imports their packages, whose modules register their rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainctl.config.extras import package_version
from trainctl.config.json_file import JsonDocument, read_json
from trainctl.config.model_directory import fill_from_directory
from trainctl.config.schema import ModelConfig
from trainctl.errors import Finding
from trainctl.hardware import Hardware
from trainctl.rules.deepspeed.case import Case, JsonContext
from trainctl.rules.deepspeed_schema import Schema, load, versions
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import Rule, registered

JSON_RULES: tuple[Rule[Case], ...] = tuple(each for each in registered() if each.file)
PLAN_RULES: tuple[Rule[Draft], ...] = tuple(each for each in registered() if not each.file)
"""Rules by code. Codes are never reused; a rule that is dropped leaves a gap."""


def check_draft(draft: Draft) -> tuple[Finding, ...]:
    """Return the findings on a plan, in the order of the rules.

    A rule never stops the others, so that all problems of a configuration are reported at once.
    """
    return tuple(finding for rule in PLAN_RULES for finding in rule.findings(draft))


def check_case(case: Case) -> tuple[Finding, ...]:
    """Return the findings on a JSON, errors first, otherwise in the order of the rules."""
    found = [finding for rule in JSON_RULES for finding in rule.findings(case)]
    return tuple(sorted(found, key=lambda finding: not finding.is_error))


def check_json(
    json: Mapping[str, Any], around: JsonContext | None = None, schema: Schema | None = None
) -> tuple[Finding, ...]:
    """Return the findings on a DeepSpeed JSON, which name its dotted keys.

    `around` holds the known facts about its use. `schema` belongs to the version of DeepSpeed that
    will read it; the newest known by default.
    """
    return check_case(Case(json, around or JsonContext(), schema or load()))


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
    around: JsonContext
    """Devices, ranks and model that it was checked for."""

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
    named.sort(key=lambda finding: (not finding.is_error, _finding_line(finding)))
    return CheckedFile(
        document=document, findings=tuple(named), schema=schema, installed=installed, around=around
    )


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
        model=None if model is None else _model_shape(model),
    )


def installed_deepspeed() -> str:
    """Return the installed DeepSpeed's version without importing it; empty if there is none."""
    return package_version("deepspeed").partition("+")[0]


def _model_shape(directory: Path) -> ModelConfig:
    return fill_from_directory(ModelConfig(name="hf", family="hf", path=str(directory)))


def _with_line(finding: Finding, document: JsonDocument, path: Path) -> Finding:
    line = document.line_of(finding.key)
    return finding.set_by(f"{path}:{line}" if line else str(path))


def _finding_line(finding: Finding) -> int:
    number = finding.source.rpartition(":")[2]
    return int(number) if number.isdecimal() else 0
