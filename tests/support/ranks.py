"""Functions that run in a forked rank: join the process group, train or probe, leave."""

from __future__ import annotations

import copy
import functools
import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cpuinfo
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.utils import groups
from rank_processes import Case

from trainctl.config.schema import OffloadDevice
from trainctl.engines.patch_checks import apply_patches
from trainctl.engines.process import Process, stop_process, use_fp32_cpu_products
from trainctl.engines.protocol import engine_backend
from trainctl.plans.types import Batch
from trainctl.runs.records import EventWriter
from trainctl.train.loop import Trainer
from trainctl.train.session import Session, assemble

# DeepSpeed asks three times for each operator in host memory, each time by a process of its own.
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)

_GROUPS = {
    name: copy.copy(value)
    for name, value in vars(groups).items()
    if not name.startswith("__") and (value is None or isinstance(value, dict | list))
}
"""DeepSpeed's record of process groups before the first engine is built."""


def load_operator(name: str) -> None:
    """Load one of DeepSpeed's operators, compiled if necessary; runs in the server."""
    get_accelerator().create_op_builder(name).load()


def load_module(name: str) -> None:
    """Import a module that only some cases need; runs in the server."""
    importlib.import_module(name)


def train(cases: list[Case]) -> None:
    """Train each case as a launched rank does, and record the samples that are really read."""
    with _joined(cases) as process:
        for case in cases:
            # As a new process would have it: other cases of this process may use another format.
            use_fp32_cpu_products(case.plan.config.precision, process.device)
            train_case(case, process)
            forget_groups()


def forget_groups() -> None:
    """Restore DeepSpeed's record of process groups, which the next engine would reuse."""
    for name, value in _GROUPS.items():
        setattr(groups, name, copy.copy(value))


def train_case(case: Case, process: Process) -> None:
    """Train a case on a rank that has joined the others."""
    session = assemble(case.plan, case.run, process)
    _assert_swapped(session)
    mesh = session.mesh
    if all(axis.is_first for axis in (mesh.tensor, mesh.sequence, mesh.context, mesh.pipeline)):
        session.training = _Watched(session.training, case)  # type: ignore[assignment]
    events = EventWriter(case.run.events, case.attempt) if process.is_first else None
    Trainer(session, events, attempt=case.attempt).train()
    process.barrier()
    session.engine.close()


def _assert_swapped(session: Session) -> None:
    """Check that parameters are swapped; DeepSpeed silently keeps those below a megabyte in
    memory.
    """
    offload = session.plan.config.offload
    if offload.optimizer is OffloadDevice.nvme:
        assert session.state.is_swapped
    if offload.parameters is OffloadDevice.nvme:
        statuses = {parameter.ds_tensor.status for parameter in session.engine.pieces}
        assert PartitionedParamStatus.NOT_AVAILABLE in statuses


def probe(work: tuple[list[Case], str]) -> Any:
    """Call the ``module:function`` with the cases and this rank; return its result."""
    cases, name = work
    module, _, function = name.partition(":")
    with _joined(cases) as process:
        return getattr(importlib.import_module(module), function)(cases, process)


@contextmanager
def _joined(cases: list[Case]) -> Iterator[Process]:
    torch.set_num_threads(1)
    for case in cases:  # a launched rank makes those of its own run alone
        apply_patches(case.plan.config)
    yield engine_backend(cases[0].plan).start_process(cases[0].plan)
    stop_process()


class _Watched:
    """Training data of a rank that records the samples it returned."""

    def __init__(self, data: Any, case: Case) -> None:
        self._data = data
        self._path = case.run.root / f"seen-{case.attempt}.jsonl"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def step(self, first_sample: int, batch: Batch) -> Any:
        batches = self._data.step(first_sample, batch)
        ids = [int(sample) for batch in batches for sample in batch.sample_ids]
        with self._path.open("a") as file:  # one short write, so that the ranks' lines do not mix
            file.write(json.dumps({"first": first_sample, "ids": ids}) + "\n")
        return batches
