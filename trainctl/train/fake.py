"""Models on fake tensors: what goes wrong in their code is the model's, and said in a sentence."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainctl.config.schema import ModelConfig
from trainctl.errors import TrainctlError
from trainctl.train import user_code


@contextmanager
def in_words(model: ModelConfig, done: str) -> Iterator[None]:
    """Turn what a model's code raises into a sentence, without a traceback.

    Args:
        model: The model.
        done: What cannot be: "built", "traced".

    Raises:
        TrainctlError: In place of any other exception.
    """
    # torch logs what we say in a sentence.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except TrainctlError:
        raise
    except Exception as error:
        where = f"{model.path}/config.json: " if model.is_directory else ""
        raise TrainctlError(
            f"{where}{model.name} cannot be {done}: {user_code.in_words(error)}",
            hint=way_out(model),
        ) from error
    finally:
        log.setLevel(level)


def way_out(model: ModelConfig) -> str:
    """What to do about a model whose code fails."""
    if not model.is_directory:
        return "leave --exact out: the budget then follows from the model's shape"
    return (
        "transformers could not train from this directory either"
        if model.trust_remote_code or not list(Path(str(model.path)).glob("*.py"))
        else "the directory has Python code of its own: model.trust_remote_code=true runs it"
    )
