"""The rules' texts by identifier; those over DeepSpeed's JSON say theirs where they are declared
(`trainctl.rules.deepspeed`)."""

from __future__ import annotations

from trainctl.explanations.rules import batch, data, layout, machine, numbers, reading, run, zero

_TABLES = (layout, batch, zero, numbers, run, data, reading, machine)
ENTRIES = dict(sorted((name, entry) for table in _TABLES for name, entry in table.ENTRIES.items()))
"""What is known of each, in their order."""
