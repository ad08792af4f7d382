"""Runs inside a rank: weights that ZeRO-3 has gathered at once, and how often it gathers."""

from typing import Any

from trainctl.train.session import assemble

STEPS = 3
"""Steps before the count is stable: the first records the module order for the prefetch."""


def most(cases: list[Any], process: Any) -> list[int]:
    """Return the peak of gathered elements in each case's third step, without persistent ones."""
    return [_of(case, process)[0] for case in cases]


def calls(cases: list[Any], process: Any) -> list[int]:
    """Return how often DeepSpeed looks for parameters to gather in each case's third step."""
    return [_of(case, process)[1] for case in cases]


def _of(case: Any, process: Any) -> tuple[int, int]:
    session = assemble(case.plan, case.run, process)
    engine = session.engine
    coordinator = engine.deepspeed.optimizer.parameter_offload.get_param_coordinator()
    parameters = list(engine.deepspeed.module.parameters())
    fetch, seen = coordinator.fetch_sub_module, [0, 0]

    def counted(module: Any, forward: bool) -> None:
        fetch(module, forward)
        seen[1] += 1
        here = sum(
            parameter.ds_numel
            for parameter in parameters
            if parameter.ds_status.name != "NOT_AVAILABLE" and not parameter.ds_persist
        )
        seen[0] = max(seen[0], here)

    coordinator.fetch_sub_module = counted
    engine.set_learning_rate(1e-3)
    for step in range(STEPS):
        seen[:] = 0, 0
        engine.accumulate(session.training.step(step, case.plan.batch))
        engine.update(norm=session.gradients.norms().total, clip_at=1.0)
    session.engine.close()
    return seen[0], seen[1]
