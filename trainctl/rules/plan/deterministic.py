"""Rule about settings that undo the fixed order of sums of `training.deterministic`."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import CompileKind
from trainctl.plan.deterministic import VARIABLES
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import Problem, rule


@rule(
    "TC027",
    "kernels.compile",
    "launcher.environment",
    example="recipe=tiny training.deterministic=true "
    "launcher.environment.CUBLAS_WORKSPACE_CONFIG=':0:0'",
)
def sums_keep_their_order(draft: Draft) -> Iterator[Problem]:
    """Nothing overrides what training.deterministic sets.

    training.deterministic sets variables that make sums keep their order, before torch is loaded.
    Another value of the same variable would undo it in silence.

    Fix: Leave the variable to trainctl; deepcompile cannot be combined with it.
    """
    config = draft.config
    if not config.training.deterministic:
        return
    for name, value in VARIABLES.items():
        if name in config.launcher.environment:  # may hold a secret: never print the value
            yield Problem(
                f"launcher.environment sets {name}, which training.deterministic=true sets to "
                f"{value}",
                f"leave {name} out",
                key="launcher.environment",
            )
    if config.kernels.compile is CompileKind.deepcompile:
        yield Problem(
            "kernels.compile=deepcompile with training.deterministic=true: its graph, and what it "
            "reduces together, follows times and memory that it measures",
            "kernels.compile=blocks, or training.deterministic=false",
        )
