"""`python -m trainctl.train.models.hf_weights_entry`: compare weights with the model.

`trainctl.search.input_files` starts it if the names in the files are not the model's own, and reads
the answer from the last line of standard output.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from trainctl.config.codec import from_plain
from trainctl.config.schema import ModelConfig
from trainctl.models.safetensors_files import stored_tensors


def main() -> None:
    """Read the question, write the answer."""
    asked = json.load(sys.stdin)
    with redirect_stdout(sys.stderr):  # a directory's own code may print
        answer = _answer(asked)
    print(json.dumps(answer))


def _answer(asked: dict[str, Any]) -> dict[str, list[str]]:
    logging.disable(logging.WARNING)  # warnings of libraries during import
    import torch

    from trainctl.train.models.hf_weights import StoredModel
    from trainctl.train.models.model import skeleton, with_portable_attention

    model = skeleton(
        with_portable_attention(from_plain(ModelConfig, asked["model"])), torch.bfloat16
    )
    found = StoredModel(model, stored_tensors(Path(asked["folder"])))
    return {"problems": found.problems, "unused": found.unused}


if __name__ == "__main__":
    main()
