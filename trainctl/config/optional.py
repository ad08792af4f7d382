"""Import of optional packages, with an error that names the extra to install."""

from __future__ import annotations

import importlib
from typing import Any

from trainctl.errors import ExitCode, TrainctlError


def optional(module: str, what: str, extra: str = "data") -> Any:
    """Import a module of a package that trainctl's base installation does not include.

    Args:
        what: Subject of the error message, such as ``reading Parquet``.
        extra: Extra of trainctl that installs the package.

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
