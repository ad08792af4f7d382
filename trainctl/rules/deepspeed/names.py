"""Names of keys and settings in the messages of rules, in the terms of the JSON's author."""

from __future__ import annotations

from typing import Any

from trainctl.rules.deepspeed.values import shown


class Names:
    """Names for a user's own JSON: its keys. `PlanNames` uses config keys for a plan's JSON."""

    def key(self, key: str) -> str:
        """Return the name of a dotted JSON key."""
        return key

    def setting(self, key: str, value: Any) -> str:
        """Return the name of a key with its value."""
        return f"{key}={plain(value)}"

    def fix(self, key: str, value: Any) -> str:
        """Return the setting to write so that a key has a value."""
        return f"{key}={plain(value)}"

    def stages(self, count: int) -> str:
        """Return a number of pipeline stages in words; the JSON has no key for it."""
        return f"{count} pipeline stage{'s' if count > 1 else ''}"


def plain(value: Any) -> str:
    """Return a value as it is written on the command line: text without quotes."""
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else shown(value)
