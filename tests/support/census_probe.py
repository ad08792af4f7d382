"""Runs inside a rank: bytes of all live tensors after a step."""

import gc
from typing import Any

import torch
from ranks import forget_groups
from torch.distributed.tensor import DTensor

from trainctl.train.session import assemble


def storages() -> dict[int, tuple[int, torch.UntypedStorage]]:
    """Map the address of each live tensor's storage to its bytes and the storage itself.

    Subclasses are included; the local part of a DTensor is a tensor of its own. Holding the storage
    keeps its address from being reused.
    """
    gc.collect()
    by_address = {}
    for item in gc.get_objects():
        try:
            is_tensor = isinstance(item, torch.Tensor)
        except (ReferenceError, RuntimeError):  # a lazy module's placeholder, or a dead proxy
            continue
        if is_tensor and item.device.type != "meta" and not isinstance(item, DTensor):
            storage = item.untyped_storage()
            by_address[storage.data_ptr()] = storage.nbytes(), storage
    by_address.pop(0, None)
    return by_address


def resident(cases: list[Any], process: Any) -> list[int]:
    """Return the bytes that each case's engine keeps on this rank after one optimizer step."""
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
    forget_groups()
    return new
