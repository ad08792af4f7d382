"""What an engine says of itself: what makes the steps of a plan that names it.

No key chooses one: the plan does, and there is one that is shipped. `build` gives the
`trainctl.engines.protocol.Room`.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.registry import Spec


@dataclass
class NoKeys:
    """An engine has no section."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec(Spec):
    """What makes the steps of a run; its settings are a part of the plan."""

    keys: type = NoKeys
