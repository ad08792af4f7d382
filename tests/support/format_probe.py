"""Runs inside a rank for tests of precision and offload, with devices that a CPU stands in for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zenflow.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer
from rank_processes import Case

from trainctl.engines.process import Process
from trainctl.runs.records import EventWriter
from trainctl.train.loop import Trainer
from trainctl.train.session import Session, assemble


def train_in_fp16(cases: list[Case], process: Process) -> None:
    """Train as launched, with DeepSpeed believing that this CPU computes in fp16 (torch does)."""
    get_accelerator().is_fp16_supported = lambda: True
    _train(cases[0], process)


def train_partly_offloaded(cases: list[Case], process: Process) -> dict[str, Any]:
    """Train as launched with a "device" beside the host's memory; DeepSpeed tells them apart by
    name.

    Returns:
        Elements of master weights on the device and on the host, and the kinds of optimizers.
    """
    accelerator = get_accelerator()
    accelerator._name = "cpu:0"
    session = _train(cases[0], process)
    engine, state = session.engine, session.state
    wrapper = engine.deepspeed.optimizer
    sizes = {"device": 0, "host": 0}
    for index, tensor in enumerate(state.tensors):
        on_device = wrapper.subgroup_to_device[index] != "cpu"
        sizes["device" if on_device else "host"] += tensor.numel()
    updaters = map(engine.states.updater, range(len(state.tensors)))
    kinds = sorted({type(updater.optimizer).__name__ for updater in updaters})
    return {**sizes, "kinds": kinds}


def die_with_swapped_files(cases: list[Case], process: Process) -> list[str]:
    """Assemble, and end without closing, as a crash does; return the names of the swapped files."""
    session = assemble(cases[0].plan, cases[0].run, process)
    assert session.state.is_swapped
    process.barrier()
    return sorted(str(path) for path in Path(cases[0].plan.config.offload.nvme_path).rglob("*.swp"))


def assemble_with_zenflow_as_it_is(cases: list[Case], process: Process) -> None:
    """Assemble without trainctl's fixes of DeepSpeed's ZenFlow."""
    # The base class's method becomes visible again.
    del ZenFlowZeroOptimizer._update_model_bit16_weights
    assemble(cases[0].plan, cases[0].run, process).engine.close()


def fp8_layers(cases: list[Case], process: Process) -> dict[str, Any]:
    """Return the kinds of the model's modules by name, and the types of its parameters."""
    session = assemble(cases[0].plan, cases[0].run, process)
    model = session.engine.deepspeed.module.model
    layers = {
        "names": sorted(name for name, _ in model.named_parameters()),
        "types": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "fp8": sorted(
            name for name, module in model.named_modules() if "Float8" in type(module).__name__
        ),
        "linear": sorted(
            name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
        ),
    }
    session.engine.close()
    return layers


def _train(case: Case, process: Process) -> Session:
    session = assemble(case.plan, case.run, process)
    events = EventWriter(case.run.events, case.attempt) if process.is_first else None
    Trainer(session, events).train()
    process.barrier()
    session.engine.close()
    return session
