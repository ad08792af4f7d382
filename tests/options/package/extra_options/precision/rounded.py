"""bf16, with embeddings rounded to a few binary places as they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainctl.config.schema import DataType, PrecisionConfig
from trainctl.config.schema.option import option
from trainctl.options.precision import Precision


@dataclass
class RoundedConfig(PrecisionConfig):
    """Keys of `precision=rounded`."""

    places: int = option(4, "Binary places of an embedding.", minimum=1, maximum=8)


def build(model: Any, section: RoundedConfig) -> None:
    """Round what the embedding gives; its gradient is that of the number before."""
    scale = 2.0**section.places

    def rounded(module: Any, inputs: Any, output: Any) -> Any:
        return output + ((output * scale).round() / scale - output).detach()

    model.get_input_embeddings().register_forward_hook(rounded)


SPEC = Precision(
    name="rounded",
    keys=RoundedConfig,
    build="extra_options.precision.rounded:build",
    format=DataType.bf16,
    ability="supports_bf16",
    instead=("fp32",),
)
