"""Back to a checkpoint in the running process, whatever layout the engine has.

A process can hold one ZeRO-3 engine in its life, so the state is loaded into the one that is there.
"""

from __future__ import annotations

from trainctl.train.checkpoint import Checkpoint
from trainctl.train.engine import Engine
from trainctl.train.state import OptimizerState


def load_into_running(engine: Engine, state: OptimizerState, checkpoint: Checkpoint) -> None:
    """Give a running engine the weights, optimizer states and loss scale of a checkpoint.

    All ranks together. Between two steps only: its gradients must have been used or discarded.

    Args:
        engine: The engine.
        state: Its optimizer's.
        checkpoint: Of this run.
    """
    checkpoint.load_into(state)
    checkpoint.close()
    publish(engine, state)
    if engine.loss_scale is not None:
        engine.loss_scale.restore(checkpoint.manifest.get("loss_scale", {}))


def publish(engine: Engine, state: OptimizerState) -> None:
    """Let the model's parameters follow the master weights, as an update does; on all ranks."""
    wrapper = engine.deepspeed.optimizer
    if engine.stage == 3:
        wrapper._partition_all_parameters()
        for index in range(len(state.tensors)):
            with state.resident(index):
                wrapper._reassign_or_swap_out_partitioned_parameters(index)
        if wrapper.persistent_parameters:
            wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)
        wrapper.invalidate_secondary_tensor()
    elif engine.stage > 0:
        wrapper.update_lp_params()
    else:
        parameters = {piece.name: parameter for parameter, piece in engine.pieces.items()}
        for fragment in state.fragments:
            master = state.tensors[fragment.tensor].detach().view(-1)
            values = master[fragment.offset : fragment.offset + fragment.numel]
            flat = parameters[fragment.name].data.view(-1)
            flat[fragment.start : fragment.start + fragment.numel].copy_(values)
