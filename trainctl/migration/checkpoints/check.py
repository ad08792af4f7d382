"""Proof of exports with optimizer states: every number is read back and compared.

The weights are loaded by the library that the export is for, where it loads them without a
training of its own. All states are read by the importer of the format.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from trainctl.config.schema import RunConfig
from trainctl.migration.checkpoints.source import open_source
from trainctl.migration.checkpoints.to_torch import PIECE
from trainctl.train.checkpoint.content import CheckpointReader
from trainctl.train.export.check import (
    CheckedExport,
    ExportCase,
    TransformersTarget,
    check_directory,
    compare,
    rounding_to,
)
from trainctl.train.models.encoders import auto_class
from trainctl.train.models.model import skeleton, with_portable_attention


def check_trainer(config: RunConfig, checkpoint: Path, out: Path) -> CheckedExport:
    """Check a folder for transformers' Trainer: its model by transformers, and all states."""
    checked = check_directory(config, checkpoint, out, dtype=torch.float32)
    return _compare_states(checked, config, checkpoint, out, "trainer")


def check_dcp(config: RunConfig, checkpoint: Path, out: Path) -> CheckedExport:
    """Check a distributed checkpoint: its model by `dcp.load`, and all states."""
    case = ExportCase(config, checkpoint, out, torch.float32)
    checked = compare(case, partial(_DcpTarget, case), rounding_to(torch.float32))
    return _compare_states(checked, config, checkpoint, out, "dcp")


def check_universal(config: RunConfig, checkpoint: Path, out: Path) -> CheckedExport:
    """Check a universal checkpoint: all states. DeepSpeed loads it in an engine alone."""
    checked = CheckedExport("trainctl's importer")
    return _compare_states(checked, config, checkpoint, out, "universal")


class _DcpTarget(TransformersTarget):
    """A model of transformers with the weights that torch loads from a distributed checkpoint."""

    def __init__(self, case: ExportCase) -> None:
        super().__init__(case)
        self.library = f"torch {torch.__version__}"

    def _load(self, case: ExportCase, **trusts: bool) -> Any:
        shape = skeleton(with_portable_attention(case.config.model), torch.float32).config
        has_score = case.config.model.score_outputs is not None
        kind = auto_class(shape, has_score=has_score)
        model = kind.from_config(shape, dtype=torch.float32, **trusts)
        weights = model.state_dict()
        dcp.load({"model": weights}, checkpoint_id=str(case.out), no_dist=True)
        return model.eval()

    def stops_at(self, token: int) -> bool:
        return True  # the format has weights and states alone


def _compare_states(
    checked: CheckedExport, config: RunConfig, checkpoint: Path, out: Path, format: str
) -> CheckedExport:
    """Compare all weights and states bit for bit; add the result."""
    saved, source = CheckpointReader(checkpoint), open_source(out, format)
    model = skeleton(with_portable_attention(config.model), torch.float32)
    source.use_model(model)
    differing = []
    for name, parameter in model.named_parameters():
        for state in source.states:
            equal = True
            for start in range(0, parameter.numel(), PIECE):
                end = min(start + PIECE, parameter.numel())
                ours = saved.read_state(name, state, start, end)
                equal &= torch.equal(source.read(name, state, start, end), ours)
            checked.states += parameter.numel()
            if not equal:
                differing.append(f"{name} ({state})")
        saved.close()
    source.verify()
    if differing:
        more = f" and {len(differing) - 1:,} more" if len(differing) > 1 else ""
        checked.differences.append(f"{differing[0]}{more} differs from the checkpoint's")
    scalars = dict(saved.manifest["scalars"])
    if dict(source.scalars) != scalars:
        checked.differences.append(f"the optimizer's numbers are {source.scalars}, not {scalars}")
    if source.progress.step != saved.manifest["step"]:
        checked.differences.append(f"the step is {source.progress.step}")
    return checked
