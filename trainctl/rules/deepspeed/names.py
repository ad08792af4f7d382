"""How a message names what a rule speaks of: by the words of whoever reads it."""

from __future__ import annotations

from typing import Any

from trainctl.rules.deepspeed.values import shown


class Names:
    """Those of a JSON that somebody wrote: its own keys. A plan's are the keys of its config."""

    def key(self, key: str) -> str:
        """A key of the JSON, dotted."""
        return key

    def setting(self, key: str, value: Any) -> str:
        """A key with the value that it has."""
        return f"{key}={plain(value)}"

    def fix(self, key: str, value: Any) -> str:
        """What to write for a key to have a value."""
        return f"{key}={plain(value)}"

    def stages(self, count: int) -> str:
        """A number of pipeline stages, of which the JSON itself says nothing."""
        return f"{count} pipeline stage{'s' if count > 1 else ''}"


def plain(value: Any) -> str:
    """A value as it is typed: text without quotes."""
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else shown(value)
