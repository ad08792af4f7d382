"""A torch module of the user's own, made by the function `model.factory`.

Its structure, activations and operations are read from its own code. Of the facts below none is
used; they are a Llama's, because a family has some.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trainctl.config.schema import ModelConfig
from trainctl.config.schema.option import option
from trainctl.options.model import LAYER_NORM, Directory, llama


@dataclass
class ModuleConfig(ModelConfig):
    """Model made by a function that takes arguments of its own."""

    arguments: dict[str, Any] = option(
        {},
        "Arguments of your function, as its dataclass declares them; checked where the module is "
        "traced, and completed with their defaults.",
        example="{width: 256}",
    )
    max_position_embeddings: int = option(
        1_000_000_000,
        "Maximum sequence length that the module is defined for.",
        unit="tokens",
        minimum=1,
    )


SPEC = replace(
    llama.SPEC,
    name="module",
    keys=ModuleConfig,
    build="trainctl.train.models.module:adapt_module",
    is_module=True,
    directory=Directory(),
    norm=LAYER_NORM,  # torch's norms save their input alone
    axes=(),
    has_mup=False,
    has_liger=False,
    has_plain_head=False,
)
