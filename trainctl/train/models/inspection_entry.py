"""`python -m trainctl.train.models.inspection_entry`: answer a question by a model's own code.

A planning command starts it (`trainctl.models.tracing`, `trainctl.tuning.input_files`), so that the
command itself imports no torch.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from trainctl.child_processes import serve
from trainctl.config.codec import from_plain
from trainctl.config.registry import changed_section
from trainctl.config.schema import ModelConfig, RunConfig
from trainctl.errors import Finding, TrainctlError
from trainctl.models.tensors import stored_tensors
from trainctl.models.tracing import NOT_TRACED, Question


def main() -> NoReturn:
    """Answer questions: what was found, or the error."""

    def answer(question: bytes) -> bytes:
        asked = json.loads(question)
        found = _compare_weights(asked) if "weights" in asked else _answer_request(asked)
        return json.dumps(found).encode()

    serve(answer)


def _answer_request(asked: dict[str, Any]) -> dict[str, Any]:
    logging.disable(logging.WARNING)  # warnings of libraries during import
    config = from_plain(RunConfig, asked["config"])
    try:
        return {
            "found": _answer_question(Question(asked["question"]), config, Path(asked["folder"]))
        }
    except TrainctlError as error:
        found = error.findings or (
            Finding(
                rule=NOT_TRACED,
                key="model.path" if config.model.factory is None else "model.factory",
                message=error.message,
                hint=error.hint,
                exit_code=error.exit_code,
            ),
        )
        return {"errors": [asdict(each) for each in found]}


def _answer_question(question: Question, config: RunConfig, folder: Path) -> Any:
    try:
        from trainctl.data.user_functions import make_importable
        from trainctl.train.models.anatomy import anatomy
        from trainctl.train.models.module import complete_arguments
        from trainctl.train.models.trace import trace
    except ModuleNotFoundError as missing:
        raise TrainctlError(
            f"what this model is made of is read from transformers' own code, and {missing.name} "
            "is not installed here",
            hint="pip install torch transformers, or plan it where they are: a run keeps what was "
            "read",
        ) from None
    if config.model.factory is not None:
        make_importable(folder)
    if question is Question.factory:
        found = complete_arguments(config.model) if config.model.is_module else {}
        model = changed_section(config.model, arguments=found) if found else config.model
        return {"anatomy": anatomy(model).to_table(), "arguments": found}
    if question is Question.anatomy:
        return anatomy(config.model).to_table()
    return trace(config).to_json()


def _compare_weights(asked: dict[str, Any]) -> dict[str, list[str]]:
    """Compare the files of a folder with the model, after transformers' renaming."""
    logging.disable(logging.WARNING)  # warnings of libraries during import
    import torch

    from trainctl.models.hf_weights import StoredModel
    from trainctl.train.models.model import skeleton, with_portable_attention

    model = skeleton(
        with_portable_attention(from_plain(ModelConfig, asked["model"])), torch.bfloat16
    )
    found = StoredModel(model, stored_tensors(Path(asked["weights"])))
    return {"problems": found.problems, "unused": found.unused}


if __name__ == "__main__":
    main()
