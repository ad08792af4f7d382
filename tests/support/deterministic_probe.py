"""Runs inside a rank for `test_deterministic`."""

from __future__ import annotations

import torch
from rank_processes import Case
from torch.nn import functional
from torch.utils import deterministic

from trainctl.engines.process import Process, nondeterminism_error
from trainctl.runs.records import EventWriter
from trainctl.train.loop import Trainer
from trainctl.train.session import assemble


def train(cases: list[Case], process: Process) -> tuple[bool, bool, bool, str]:
    """Train the cases; return torch's settings, and the error for an operation that it refuses."""
    for case in cases:
        session = assemble(case.plan, case.run, process)
        events = EventWriter(case.run.events, 1) if process.is_first else None
        Trainer(session, events).train()
        process.barrier()
        session.engine.close()
    return (
        torch.are_deterministic_algorithms_enabled(),
        deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
        _refused(),
    )


def _refused() -> str:
    pooled, places = torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2, dtype=torch.long)
    try:
        functional.max_unpool2d(pooled, places, 2)
    except RuntimeError as error:
        explained = nondeterminism_error(error)
        return "" if explained is None else explained.message
    return ""
