"""Exports of a user's module: weights in safetensors beside the reference of its function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.registry import new_section
from trainctl.config.schema import ModelConfig
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.files import write_json
from trainctl.train.models.model import materialise, skeleton
from trainctl.train.models.module import ModuleModel
from trainctl.train.models.weights import SafetensorsWeights

FILE = "module.json"
"""File in place of `config.json`, with the function's reference and its arguments."""

NOT_LOADED = (
    f"{FILE} names the function and its arguments: trainctl.load reads it, transformers does not"
)


def write_module_file(model: ModelConfig, dtype: torch.dtype, folder: Path) -> None:
    """Write the reference of the function that makes the module, its arguments and the type."""
    write_json(
        folder / FILE,
        {
            "factory": model.factory,
            "arguments": getattr(model, "arguments", {}),
            "dtype": str(dtype).removeprefix("torch."),
        },
    )


def is_module_export(folder: Path) -> bool:
    """Return True if a folder holds an export of a user's module."""
    return (folder / FILE).is_file()


def load_module(folder: Path, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return the module of an export on the CPU, seen as a model of transformers.

    The function is imported as any module of this process is, and runs here: load exports that you
    trust.

    Args:
        dtype: Type of the weights; None is the export's own.

    Raises:
        TrainctlError: The folder is no such export (exit code 5), the function cannot be imported,
            or it makes another module.
    """
    try:
        found: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        factory, arguments = str(found["factory"]), dict(found["arguments"])
        kept = getattr(torch, str(found["dtype"]))
        if not isinstance(kept, torch.dtype):
            raise ValueError(f"{found['dtype']} is no type of weights")
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise TrainctlError(
            f"{folder} is no export of a module: {FILE}: {error}", exit_code=ExitCode.run_state
        ) from None
    model = new_section("model", "module", factory=factory, arguments=arguments)
    view = skeleton(model, kept if dtype is None else dtype)
    materialise(view, SafetensorsWeights(folder, view), torch.device("cpu"))
    return view.eval()


def plain_module(model: nn.Module) -> nn.Module:
    """Return a loaded model in evaluation mode; of a user's module, the module itself."""
    return (model.module if isinstance(model, ModuleModel) else model).eval()
