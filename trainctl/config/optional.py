"""Packages that only some configurations need: imported where used, named where missing."""

from __future__ import annotations

import importlib
from typing import Any

from trainctl.errors import ExitCode, TrainctlError


def optional(module: str, what: str, extra: str = "data") -> Any:
    """Return a module of a package that trainctl's own installation need not have.

    Args:
        what: That needs it, as an error begins: ``reading Parquet``.
        extra: Part of trainctl's package that brings it.

    Raises:
        TrainctlError: It is not installed (exit code 4).
    """
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise TrainctlError(
            f"{what} needs a package that is missing ({missing})",
            hint=f"pip install 'trainctl[{extra}]'",
            exit_code=ExitCode.environment,
        ) from None
