"""Configurations of the tests' own module, read as the planning process reads it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from rank_processes import tiny_config

from trainctl.config.registry import new_section
from trainctl.config.schema import ModelConfig, RunConfig
from trainctl.models.anatomy import shape_from_anatomy
from trainctl.train.models.anatomy import anatomy


def module_config(function: str = "full", **changes: Any) -> RunConfig:
    """Return a small run of the module that a function of `own_module` makes.

    Args:
        changes: As for `tiny_config`, and `arguments` of the function.
    """
    arguments = changes.pop("arguments", {})
    config = tiny_config(**{"precision__compute": "fp32", "sequence_length": 16, **changes})
    config.model = replace(module_section(function, tuple(sorted(arguments.items()))))
    return config


@cache
def module_section(function: str, arguments: tuple[tuple[str, Any], ...]) -> ModelConfig:
    """Return the section `model` with what was read from the module."""
    reference = f"own_module:{function}"
    asked = new_section("model", "module", factory=reference, arguments=dict(arguments))
    table = anatomy(asked).to_table()
    read: ModelConfig = replace(asked, anatomy=table, **shape_from_anatomy(table))
    return read
