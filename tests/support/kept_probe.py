"""Runs inside a rank: bytes that autograd saves in a forward pass, up to the logits."""

from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from trainctl.train.session import assemble


def kept(cases: list[Any], process: Any) -> list[int]:
    """Return the bytes of the storages that each case's first forward pass saves on this rank.

    Weights are excluded, and nothing may be recomputed. A census of live tensors misses some: an
    operation's saved output is no Python object.
    """
    return [_of(case, process) for case in cases]


def _of(case: Any, process: Any) -> int:
    session = assemble(case.plan, case.run, process)
    engine = session.engine
    model = next(each for each in engine.module.modules() if isinstance(each, PreTrainedModel))
    head = model.get_output_embeddings()
    saved: dict[int, torch.UntypedStorage] = {}
    is_over = False

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        weights = {each.untyped_storage().data_ptr() for each in engine.module.parameters()}
        storage = tensor.untyped_storage()
        if not is_over and storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    def stop(*_: Any) -> None:
        nonlocal is_over
        is_over = True

    handle = head.register_forward_hook(stop)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.accumulate(session.training.step(0, case.plan.batch)[:1])
    handle.remove()
    session.engine.close()
    return sum(storage.nbytes() for storage in saved.values())
