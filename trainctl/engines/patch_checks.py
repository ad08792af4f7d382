"""All tables of trainctl's changes to other packages, and of internals that it uses.

The functions compare the tables with the installed packages, find other code that has replaced a
definition, and make the changes.
"""

from __future__ import annotations

from collections.abc import Collection
from pkgutil import resolve_name
from typing import Any

from trainctl.config.schema import RunConfig
from trainctl.engines.deepspeed.patches import DEEPSPEED
from trainctl.engines.library_patches import TORCH, TORCHAO, TRANSFORMERS
from trainctl.engines.patches import ProcessKind, compare_with_installed
from trainctl.errors import Finding, TrainctlError
from trainctl.hardware.host_checks import CheckResult

TABLES = (DEEPSPEED, TRANSFORMERS, TORCH, TORCHAO)

TRAINING = frozenset({ProcessKind.rank, ProcessKind.model})


def check_needed_definitions(
    config: RunConfig, at: Collection[ProcessKind] = TRAINING
) -> list[Finding]:
    """Return a finding for each definition that a run needs and that is installed differently.

    Args:
        at: The processes to check for.
    """
    return [finding for table in TABLES for finding in table.differences(config, at)]


def check_definitions(config: RunConfig) -> list[CheckResult]:
    """Return one check for each package, over the definitions that a run of the configuration
    uses.
    """
    examined = []
    for table in TABLES:
        needed = table.needed(config, TRAINING) if table.is_installed else []
        findings = table.differences(config, TRAINING)
        good = len(needed) - len(findings)
        known = f"{table.version}, read in {', '.join(table.read_in)}: {good} of {len(needed)} uses"
        facts = (f"{known} are as trainctl knows them",) if needed else ()
        examined.append(CheckResult(f"inside {table.package}", facts, tuple(findings)))
    return examined


def list_uses(config: RunConfig) -> list[dict[str, Any]]:
    """Return every entry of every table, compared with the installed package, as JSON objects."""
    return [
        {
            "package": table.package,
            "installed": table.version,
            "read_in": list(table.read_in),
            "name": use.name,
            "how": use.how.value,
            "where": use.at.value,
            "why": use.why,
            "upstream": use.upstream,
            "key": use.need.key,
            "is_needed": use.at in TRAINING and table.is_needed(use, config),
            "difference": compare_with_installed(use) if table.is_installed else None,
            "fallback": use.fallback,
        }
        for table in TABLES
        for use in table.uses
    ]


def require_definitions(config: RunConfig, at: Collection[ProcessKind] = TRAINING) -> None:
    """Raise before a changed package would be used wrongly.

    Raises:
        TrainctlError: A definition is not the one that trainctl was written for (exit code 4).
    """
    _raise_findings(check_needed_definitions(config, at))


def require_original_definitions(config: RunConfig) -> None:
    """Raise as `require_definitions` does, or if other code in this process has replaced a
    definition.

    This imports the packages.

    Raises:
        TrainctlError: A definition differs or was replaced (exit code 4).
    """
    require_definitions(config)
    _raise_findings([finding for table in TABLES for finding in table.replaced(config, TRAINING)])


def apply_patches(config: RunConfig) -> None:
    """Make the changes to other packages that a rank of the configuration needs.

    Importing a module changes nothing: this function is the only place that makes changes.
    """
    for table in TABLES:
        for use in table.uses:
            if use.apply and table.is_needed(use, config):
                resolve_name(use.apply)()


def _raise_findings(findings: list[Finding]) -> None:
    errors = [finding for finding in findings if finding.is_error]
    if errors:
        raise TrainctlError(
            "; ".join(finding.message for finding in errors),
            hint=", ".join(dict.fromkeys(finding.hint for finding in errors)),
            exit_code=errors[0].exit_code,
        )
