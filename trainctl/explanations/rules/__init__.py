"""Explanations of the rules by identifier. Rules over DeepSpeed's JSON have theirs where they are
declared (`trainctl.rules.deepspeed`).
"""

from __future__ import annotations

from trainctl.explanations.rules import batch, data, layout, numbers, run, zero

_TABLES = (layout, batch, zero, numbers, run, data)
ENTRIES = dict(sorted((name, entry) for table in _TABLES for name, entry in table.ENTRIES.items()))
"""Explanations of all rules, sorted by identifier."""
