"""Errors in the code of models that run on fake tensors, reported in a sentence."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from trainctl.config.schema import ModelConfig
from trainctl.data import user_functions as user_code
from trainctl.errors import TrainctlError


@contextmanager
def in_words(model: ModelConfig, done: str) -> Iterator[None]:
    """Turn an exception of the model's code into one sentence without a traceback.

    Args:
        done: Participle for the message, "built" or "traced".

    Raises:
        TrainctlError: In place of any other exception.
    """
    # torch would log the error that is reported in a sentence below.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except TrainctlError:
        raise
    except Exception as error:
        where = f"{model.path}/config.json: " if model.is_directory else ""
        where = where if model.factory is None else f"model.factory={model.factory}: "
        what, hint = user_code.in_words(error), failure_hint(model)
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            what = f"its code goes by values, and there are none ({_place_outside_torch(error)})"
            hint = "an architecture whose code goes by shapes" if model.is_directory else hint
        raise TrainctlError(f"{where}{model.name} cannot be {done}: {what}", hint=hint) from error
    finally:
        log.setLevel(level)


def _place_outside_torch(error: Exception) -> str:
    """Return file and line of the model's code that led to an error within torch."""
    torch_itself = str(Path(torch.__file__).parent)
    places = traceback.extract_tb(error.__traceback__)
    own = [place for place in places if not place.filename.startswith(torch_itself)]
    return f"{own[-1].filename}:{own[-1].lineno}"


def failure_hint(model: ModelConfig) -> str:
    """Return the hint for a model whose code fails."""
    if model.has_closed_form:
        return "leave --exact out: the budget then follows from the model's shape"
    if model.factory is not None:
        return "plan and budget count what this function makes, on tensors without values"
    if model.trust_remote_code or not has_own_code(model):
        return "transformers could not train from this directory either"
    return "config.json names code of its own (auto_map): model.trust_remote_code=true runs it"


def has_own_code(model: ModelConfig) -> bool:
    """Return True if the directory's config.json names code of its own for the model."""
    try:
        content = json.loads((Path(str(model.path)) / "config.json").read_text(encoding="utf-8"))
        named = set(content["auto_map"])
    except (OSError, ValueError, TypeError, LookupError):
        return False
    return not named.isdisjoint(("AutoConfig", "AutoModel", "AutoModelForCausalLM"))
