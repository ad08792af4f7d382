"""Any decoder of transformers: what its directory says, its tensors and activations traced.

Where nothing is traced yet it is counted as a Llama of the same shape.
"""

from __future__ import annotations

from dataclasses import replace

from trainctl.options.model import Directory, llama

SPEC = replace(
    llama.SPEC,
    name="hf",
    build="trainctl.train.model:directory_config",
    is_directory=True,
    directory=Directory(),
    has_window=True,
    axes=(),
    has_mup=False,
    has_liger=False,
    has_plain_head=False,
)
