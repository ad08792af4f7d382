"""Runs inside a rank: the bytes that a forward pass leaves behind, up to the output projection."""

from typing import Any

from census_probe import storages

from trainctl.train.session import assemble


def kept(cases: list[Any], process: Any) -> list[int]:
    """Bytes of tensors that are there before each case's output projection and were not before the
    step, on this rank."""
    return [_of(case, process) for case in cases]


def _of(case: Any, process: Any) -> int:
    session = assemble(case.plan, case.run, process)
    engine = session.engine
    engine.set_learning_rate(1.0)
    # What is made once, such as gradients at stage 3, is made in the first step.
    engine.accumulate(session.training.step(0, case.plan.batch))
    engine.update(norm=session.gradients.norms().total, clip_at=1.0)
    head = next(
        module for name, module in engine.module.named_modules() if name.endswith("lm_head")
    )
    before, found = storages(), []

    def look(*_: Any) -> None:
        now = storages()
        found.append(
            sum(
                size
                for address, (size, _) in now.items()
                if address not in before or before[address][0] != size
            )
        )

    handle = head.register_forward_pre_hook(look)
    engine.accumulate(session.training.step(1, case.plan.batch))
    handle.remove()
    session.engine.close()
    return found[0]
