"""Result of an import: choices, settings, and the keys that are not carried over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from trainctl.config.catalog import BASE
from trainctl.config.keys import as_override
from trainctl.config.schema import GROUPS
from trainctl.config.secrets import REDACTED, is_secret_name, redact_text
from trainctl.errors import Finding, TrainctlError
from trainctl.tuning.recipes import recipe_text


class Why(StrEnum):
    """Reason class of a key that is not carried over."""

    left = "left"
    """trainctl does otherwise, or has no such thing."""
    ignored = "ignored"
    """Nothing is lost: trainctl does the same, or the key concerns the other program alone."""
    unknown = "unknown"
    """No table has the key."""
    default = "default"
    """The file does not have the key, and what its program would then do differs from trainctl."""


@dataclass(frozen=True, slots=True)
class LeftOutKey:
    """Key of the source that is not imported, with its value and the reason."""

    key: str
    value: Any
    reason: str
    nearest: str = ""
    """The nearest that trainctl has, or what to do; empty if nothing comes close."""
    why: Why = Why.left


AUTO, OF_A_SCRIPT = "auto", ("model", "tokenizer", "data")
"""Value of accelerate's that the Trainer's replaces, and groups that its file does not say."""


@dataclass(frozen=True, slots=True)
class ImportResult:
    """Result of an import."""

    choices: Mapping[str, str]
    """Option of each group that the source implies."""
    settings: Mapping[str, Any]
    """Keys with their values. Those of a DeepSpeed JSON are only those that differ from the chosen
    options.
    """
    passed: Mapping[str, Any]
    """DeepSpeed keys that are passed through, without the prefix `deepspeed.`."""
    left_out: tuple[LeftOutKey, ...]
    """Keys that are not imported."""
    carried: tuple[str, ...] = ()
    """Keys of the source that are imported."""
    origins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Keys of the source that ask for each of trainctl's keys and groups, where tables say it."""
    tool: str = "deepspeed"
    """Program that the source configures."""
    file: str = ""
    """Name of the imported file."""
    findings: tuple[Finding, ...] = ()
    """Warnings about the source, and what the resulting configuration lacks as errors."""

    def without(
        self, key: str, reason: str, nearest: str, source: Mapping[str, Any]
    ) -> ImportResult:
        """Return the result without trainctl's key or group, whose sources are left out.

        Args:
            source: Values of the source's keys.
        """
        there = [each for each in self.origins.get(key, ()) if each in self.carried]
        values = {each: _without_secrets(each, source.get(each)) for each in there}
        left = (LeftOutKey(each, value, reason, nearest) for each, value in values.items())
        return replace(
            self,
            choices={name: value for name, value in self.choices.items() if name != key},
            settings={name: value for name, value in self.settings.items() if name != key},
            carried=tuple(each for each in self.carried if each not in there),
            left_out=(*self.left_out, *left),
        )

    def beside(self, other: ImportResult) -> ImportResult:
        """Return one result with that of accelerate's configuration, which says how ranks run.

        Raises:
            TrainctlError: Both ask for different values of a key.
        """
        mine, its = ({**each.choices, **each.settings} for each in (self, other))
        its = {k: v for k, v in its.items() if v != AUTO and (k not in OF_A_SCRIPT or k in mine)}
        differing = [
            f"{' and '.join(other.origins[key])} asks for {key}={as_override(its[key])}, and "
            f"{' and '.join(self.origins[key])} for {as_override(mine[key])}"
            for key in mine.keys() & its.keys() & self.origins.keys() & other.origins.keys()
            if mine[key] != its[key]
        ]
        if differing:
            raise TrainctlError("; ".join(sorted(differing)), hint="give both files the same value")
        asked = other.origins.keys() - self.origins.keys()
        merged = {**its, **mine, **{key: its[key] for key in asked & its.keys()}}
        return replace(
            self,
            choices={key: value for key, value in merged.items() if key in GROUPS},
            settings={key: value for key, value in merged.items() if key not in GROUPS},
            passed={**other.passed, **self.passed},
            left_out=(*self.left_out, *other.left_out),
            carried=(*self.carried, *other.carried),
            origins={**other.origins, **self.origins},
            findings=(*self.findings, *other.findings),
        )

    def with_machines(
        self, settings: Mapping[str, Any], findings: tuple[Finding, ...]
    ) -> ImportResult:
        """Return the result with machines and launcher of a script, unless it has them already."""
        added = {key: value for key, value in settings.items() if key not in self.settings}
        return replace(
            self,
            choices={**self.choices, **{k: v for k, v in added.items() if k in GROUPS}},
            settings={**self.settings, **{k: v for k, v in added.items() if k not in GROUPS}},
            findings=(*self.findings, *findings),
        )

    @property
    def missing(self) -> tuple[Finding, ...]:
        """Errors of the resulting configuration: what must be added before it validates."""
        return tuple(finding for finding in self.findings if finding.is_error)

    @property
    def overrides(self) -> list[str]:
        """Command-line overrides, without shell quotes."""
        return [
            *(f"{group}={option}" for group, option in self.choices.items()),
            *(f"{key}={as_override(value)}" for key, value in self.all_settings.items()),
        ]

    @property
    def all_settings(self) -> dict[str, Any]:
        """Settings, and the passed keys with their prefix."""
        return {**self.settings, **{f"deepspeed.{key}": v for key, v in self.passed.items()}}

    @property
    def recipe(self) -> str:
        """The result as a recipe that extends `base`."""
        return recipe_text([f"Imported from {self.file}."], BASE, self.choices, self.all_settings)


@dataclass
class ConvertedKeys:
    """Values of trainctl's keys that a source asks for, while they are collected."""

    choices: dict[str, str] = field(default_factory=dict)
    """Option of each group."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Value of each key."""
    imported: set[str] = field(default_factory=set)
    """Keys and sections of the source that are imported by these."""
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Keys of the source that ask for each of trainctl's; without those set by defaults."""
    left_out: list[LeftOutKey] = field(default_factory=list)

    def take(self, key: str, ours: str, value: Any) -> None:
        """Import the source's key `key` as trainctl's key or group `ours`."""
        self.imported.add(key)
        self.origins[ours] = (key,)
        self.set(ours, value)

    def set(self, ours: str, value: Any) -> None:
        """Set trainctl's key, or the option of its group."""
        if ours in GROUPS:
            self.choices[ours] = str(value)
        else:
            self.settings[ours] = value

    def leave(
        self, key: str, value: Any, reason: str, nearest: str = "", why: Why = Why.left
    ) -> None:
        """Record a key of the source that is not imported; the value of a secret is not kept."""
        self.left_out.append(LeftOutKey(key, _without_secrets(key, value), reason, nearest, why))


def _without_secrets(key: str, value: Any) -> Any:
    """Return the value of a key without tokens and passwords, also those in a URL."""
    if value is not None and is_secret_name(key.rpartition(".")[2]):
        return REDACTED
    if isinstance(value, list):
        return [_without_secrets(key, each) for each in value]
    return redact_text(value) if isinstance(value, str) else value
