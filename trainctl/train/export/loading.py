"""Models of exports, in this process: the trainer's side of `trainctl.load`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging

from trainctl.data.tokenizer import load_tokenizer
from trainctl.data.user_functions import make_importable
from trainctl.options.tokenizer import spec_of
from trainctl.runs.attempts import config_of
from trainctl.runs.directory import read_record
from trainctl.runs.layout import RunPaths
from trainctl.train.export.module import is_module_export, load_module, plain_module
from trainctl.train.models.encoders import auto_class

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_run_export(run: RunPaths, folder: Path, dtype: str) -> tuple[Any, Any]:
    """Return the model in an export of the run's weights, on the CPU, and the run's tokenizer.

    Args:
        folder: The export; it may be removed afterwards.
        dtype: Number format of its weights.
    """
    config = config_of(run)
    trusts_code = config.model.trust_remote_code
    kind: Any = None
    if config.model.factory is not None:
        make_importable(Path(str(read_record(run)["folder"])))  # as on the ranks
        if not is_module_export(folder):
            from trainctl.train.models.model import factory_model  # slow: brings the quantizers

            kind = type(factory_model(config.model, TYPES[dtype]))
    model = _load_model(folder, TYPES[dtype], kind, trusts_code=trusts_code)
    if spec_of(config.tokenizer).published is None:
        return model, load_tokenizer(config.tokenizer)
    return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts_code)


def load_export(folder: Path, dtype: str | None) -> tuple[Any, Any]:
    """Return the model of an exported directory, on the CPU, and its tokenizer: None if the
    directory has none.

    Args:
        dtype: Number format of the weights; None is the export's own.
    """
    model = _load_model(folder, None if dtype is None else TYPES[dtype])
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    return model, AutoTokenizer.from_pretrained(folder) if has_tokenizer else None


def _load_model(
    folder: Path, dtype: torch.dtype | None, kind: Any = None, *, trusts_code: bool = False
) -> Any:
    """Return the model of an export in evaluation mode, read by a class of transformers if the
    directory has a config.json: by `kind`, else by the auto class of its architecture.
    """
    if is_module_export(folder):
        return plain_module(load_module(folder, dtype=dtype))
    settings = {"trust_remote_code": True} if trusts_code else {}
    if kind is None:
        config = AutoConfig.from_pretrained(folder, **settings)
        named = config.architectures or [""]
        kind = auto_class(config, has_score=named[0].endswith("ForSequenceClassification"))
    with _quiet():
        return kind.from_pretrained(folder, dtype=dtype or "auto", **settings)


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
