"""Any decoder of transformers, defined by its directory.

Its structure is read from its own code, and its activations are traced. Of the facts below, only a
Llama's module names are used, and only where the model is a Llama.
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
