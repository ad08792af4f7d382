"""Models of exported checkpoints, in this process: the trainer's side of `trainctl.load`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from trainctl.config.schema import RunConfig
from trainctl.data.tokenizer import load_tokenizer
from trainctl.data.user_functions import make_importable
from trainctl.options.tokenizer import spec_of
from trainctl.runs.attempts import config_of
from trainctl.runs.directory import read_record
from trainctl.runs.layout import RunPaths

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_export(run: RunPaths, folder: Path, dtype: str) -> tuple[Any, Any]:
    """Return the model in an export of the run's weights, on the CPU, and the run's tokenizer.

    Args:
        folder: The export; it may be removed afterwards.
        dtype: Number format of its weights.
    """
    config = config_of(run)
    trusted = {"trust_remote_code": True} if config.model.trust_remote_code else {}
    with _quiet():
        model = _class(run, config, TYPES[dtype]).from_pretrained(
            folder, dtype=TYPES[dtype], **trusted
        )
    if spec_of(config.tokenizer).published is None:
        return model, load_tokenizer(config.tokenizer)
    return model, AutoTokenizer.from_pretrained(folder, **trusted)


def _class(run: RunPaths, config: RunConfig, dtype: torch.dtype) -> Any:
    """Return the class that reads the export: the user's own of `model.factory`, or any causal LM
    of transformers.
    """
    if config.model.factory is None:
        return AutoModelForCausalLM
    from trainctl.train.models.model import factory_model  # slow: brings the quantizers

    make_importable(Path(str(read_record(run)["folder"])))  # as on the ranks
    return type(factory_model(config.model, dtype))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bar off the terminal or the notebook."""
    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()
