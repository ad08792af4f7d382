"""Explanation of a rule, beyond the sentence in its docstring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RuleText:
    """Reason for a rule, an example that violates it, and the remedy."""

    cause: str
    """Consequence without the rule, or a common way to violate it."""
    cure: str
    """Remedy in general; each finding states it with the values at hand."""
    example: str = ""
    """Arguments of `trainctl validate` that violate the rule; empty if no configuration alone
    does.
    """
    title: str = ""
    """Title of the finding; empty if the rule's docstring serves as one."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that the example needs: text by path."""
    situation: str = ""
    """Situation in which the rule is violated; only without an example."""
    message: str = ""
    """Message printed in that situation; only without an example."""
