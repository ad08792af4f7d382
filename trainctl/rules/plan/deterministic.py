"""Rule about settings that undo the fixed order of sums of `training.deterministic`."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import CompileKind
from trainctl.errors import Finding
from trainctl.plan.deterministic import VARIABLES
from trainctl.rules.plan.draft import Draft, error


def sums_keep_their_order(draft: Draft) -> Iterator[Finding]:
    """Variables of the user's win over trainctl's; DeepCompile follows what it has measured."""
    config = draft.config
    if not config.training.deterministic:
        return
    for name, value in VARIABLES.items():
        if name in config.launcher.environment:  # may hold a secret: never print the value
            yield error(
                "launcher.environment",
                f"launcher.environment sets {name}, which training.deterministic=true sets to "
                f"{value}",
                f"leave {name} out",
            )
    if config.kernels.compile is CompileKind.deepcompile:
        yield error(
            "kernels.compile",
            "kernels.compile=deepcompile with training.deterministic=true: its graph, and what it "
            "reduces together, follows times and memory that it measures",
            "kernels.compile=blocks, or training.deterministic=false",
        )
