"""Any decoder of transformers: what its directory says.

What it is made of is read from its own code, and its activations are traced: nothing below is said
of it, but what its ranks need of a Llama's modules where it is one.
"""

from __future__ import annotations

from dataclasses import replace

from trainctl.options.model import Directory, llama

SPEC = replace(
    llama.SPEC,
    name="hf",
    build="trainctl.train.models.model:directory_config",
    is_directory=True,
    directory=Directory(),
    has_window=True,
    axes=(),
    has_mup=False,
    has_liger=False,
    has_plain_head=False,
)
