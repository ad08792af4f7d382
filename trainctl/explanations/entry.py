"""What is known of a rule beyond the sentence that says what must hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RuleText:
    """Why a rule is there, a case in which it speaks, and what to do."""

    cause: str
    """What would go wrong without it, or how one comes to break it."""
    cure: str
    """What to do; each finding says it with the values at hand."""
    example: str = ""
    """What is typed after `trainctl validate` to see it; empty where no configuration alone brings
    it about."""
    title: str = ""
    """What is found; empty of a rule whose docstring says what must hold."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that the example needs beside it, by their path: the text of each."""
    situation: str = ""
    """Without an example, where it comes up."""
    message: str = ""
    """Without an example, what is said there."""
