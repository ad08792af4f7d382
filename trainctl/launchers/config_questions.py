"""Questions about configurations: what set a value, and how two differ."""

from __future__ import annotations

from pathlib import Path

from trainctl.config.compose import ComposedConfig
from trainctl.errors import Finding, TrainctlError
from trainctl.launchers.planning import compose_target, plan_config
from trainctl.models.local_path import local_path
from trainctl.rules.keyword_search import find_by_keywords
from trainctl.tuning.config_diff import ComparedConfig, json_config, planned_config
from trainctl.tuning.value_explanation import Explanation, explain_known


def explain_value(key: str, composed: ComposedConfig) -> Explanation:
    """Say what set a value of a composed configuration, or how it is derived.

    Raises:
        TrainctlError: There is no such key; or the value follows from a plan, and none can be made.
    """
    planned = plan_config(composed)
    made = planned.assessment.plan
    try:
        return explain_known(key, planned.composed, made)
    except TrainctlError:
        if made is None:
            error = TrainctlError.from_findings(planned.findings)
            if find_by_keywords(key.replace(".", " ")):
                error.hint = f"`trainctl explain {key}` finds keys and pages"
            raise error from None
        raise


def read_compared(
    name: str, config_dir: Path | None, attempt: int | None = None
) -> tuple[ComparedConfig, tuple[Finding, ...]]:
    """Read a recipe, a run directory, or a file of DeepSpeed's JSON, to compare it.

    Returns:
        The configuration, and warnings of its composition.

    Raises:
        TrainctlError: It cannot be read or composed.
    """
    path = local_path(name)
    if attempt is None and (path.is_file() or path.suffix == ".json"):
        return json_config(path), ()
    composed = compose_target(name, (), config_dir, attempt=attempt)
    made = plan_config(composed).assessment.plan
    return planned_config(name, composed.config, made), composed.findings
