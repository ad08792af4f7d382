"""The optimizer's states as a checkpoint has them, where a GPU keeps them otherwise than a CPU."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed.ops.lion import FusedLion
from torch import nn

from trainctl.config.registry import new_section
from trainctl.engines.deepspeed import wrapper_base
from trainctl.engines.deepspeed.wrappers import wrapper_adapter
from trainctl.engines.shards import ParameterPiece, Shard
from trainctl.train.checkpoint.optimizer_state import OptimizerState


def state_of(optimizer: torch.optim.Optimizer, kind: str) -> OptimizerState:
    """Return the state of an optimizer of named parameters, as an engine without ZeRO has it in
    fp32.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    pieces = {
        parameter: ParameterPiece(str(index), parameter.shape, Shard.whole(parameter.shape))
        for index, parameter in enumerate(parameters)
    }
    replicas = SimpleNamespace(index=0, size=1)
    mesh = SimpleNamespace(replicas=replicas)
    states = wrapper_adapter(optimizer)(SimpleNamespace(optimizer=optimizer), pieces, mesh)
    engine = SimpleNamespace(states=states, pieces=pieces, mesh=mesh)
    return OptimizerState(engine, new_section("optimizer", kind))  # type: ignore[arg-type]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("exists", [False, True], ids=["resume", "rewind"])
def test_a_fused_kernel_finds_the_step_count_beside_the_parameter(fused, exists):
    """meta stands for the device: the kernel would follow an address of the host's there."""
    parameter = nn.Parameter(torch.empty(8, device="meta"))
    optimizer = torch.optim.AdamW([parameter], fused=fused)
    if exists:
        moments = {name: torch.empty(8, device="meta") for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(9.0), **moments}
    state_of(optimizer, "adamw").create(0, {"step": 3.0})
    assert optimizer.state[parameter]["step"].device.type == ("meta" if fused else "cpu")
    assert optimizer.state[parameter]["exp_avg"].device.type == "meta"


class CountsOnTheLast(torch.optim.SGD):
    """DeepSpeed's FusedLion, as far as its states go: it is built on GPUs only."""


def test_fused_lion_counts_steps_in_the_last_parameter_of_a_group(monkeypatch):
    monkeypatch.setitem(wrapper_base._KINDS, CountsOnTheLast, wrapper_base._KINDS[FusedLion])
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    optimizer = CountsOnTheLast(parameters)
    for parameter, step in zip(parameters, (0, 0, 5), strict=True):
        optimizer.state[parameter] = {"step": step, "exp_avg": torch.zeros(4)}
    state = state_of(optimizer, "lion")
    assert state.scalars() == {"step": 5}
    state.create(1, {"step": 5.0})
    step = optimizer.state[parameters[1]]["step"]
    assert isinstance(step, int) and step == 5


def test_states_that_differ_between_parameters_are_not_saved_as_one_number():
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters)
    for parameter, step in zip(parameters, (1.0, 2.0), strict=True):
        optimizer.state[parameter] = {"step": torch.tensor(step)}
    with pytest.raises(RuntimeError, match="step differs"):
        state_of(optimizer, "adamw").scalars()
