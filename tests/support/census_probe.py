"""Runs inside a rank: the bytes of every tensor that is alive after a step."""

import gc
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainctl.train.session import assemble


def storages() -> dict[int, tuple[int, torch.UntypedStorage]]:
    """Address of each storage that a live tensor has, those of subclasses included, to its bytes
    and itself: while it is held, nothing else can get its address. (Of a DTensor, its local part
    is a tensor of its own.)"""
    gc.collect()
    found = {}
    for item in gc.get_objects():
        try:
            is_tensor = isinstance(item, torch.Tensor)
        except (ReferenceError, RuntimeError):  # a lazy module's stand-in, or a dead proxy
            continue
        if is_tensor and item.device.type != "meta" and not isinstance(item, DTensor):
            storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes(), storage
    found.pop(0, None)
    return found


def resident(cases: list[Any], process: Any) -> list[int]:
    """Bytes that each case's engine keeps after one optimizer step, on this rank."""
    return [_of(case, process) for case in cases]


def _of(case: Any, process: Any) -> int:
    before = storages()
    session = assemble(case.plan, case.run, process)
    engine = session.engine
    engine.set_learning_rate(1.0)
    engine.accumulate(session.training.step(0, case.plan.batch))
    engine.update(norm=session.gradients.norms().total, clip_at=1.0)
    after = storages()
    new = sum(
        size
        for address, (size, _) in after.items()
        if address not in before or before[address][0] != size
    )
    session.engine.close()
    del session
    return new
