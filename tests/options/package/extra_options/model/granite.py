"""Granite (arXiv:2408.13359): a Llama whose parts have factors. A family from outside trainctl."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainctl.config.schema import ModelConfig
from trainctl.config.schema.option import option
from trainctl.options.model import Directory, llama


@dataclass
class GraniteKeys(ModelConfig):
    """Keys of the Granite architecture, named as in `config.json`."""

    embedding_multiplier: float = option(1.0, "Factor of the embedded tokens.", above=0)
    attention_multiplier: float = option(0.125, "Factor of the attention scores.", above=0)
    residual_multiplier: float = option(
        1.0, "Factor of what is added to the residual stream.", above=0
    )
    logits_scaling: float = option(1.0, "Divisor of the logits.", above=0)


SPEC = replace(
    llama.SPEC,
    name="granite",
    keys=GraniteKeys,
    directory=Directory(
        defaults={**llama.SPEC.directory.defaults, "attention_multiplier": 1.0},
        plain=llama.PLAIN,
    ),
    axes=("tensor", "sequence"),
    why_not={"pipeline": "each stage would multiply what it gets as if it were the embedding"},
    has_mup=False,
    has_liger=False,
    has_plain_head=False,
)
