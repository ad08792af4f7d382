"""`python -m trainctl.train.models.trace_entry`: trace a configured model.

`trainctl.models.tracing` starts it with the question on standard input and reads the answer from
the last line of standard output.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainctl.config.codec import from_plain
from trainctl.config.schema import RunConfig
from trainctl.errors import Finding, TrainctlError
from trainctl.models.tracing import NOT_TRACED, Question


def main() -> None:
    """Read the question and write the answer: the findings, or the error."""
    asked = json.load(sys.stdin)
    with redirect_stdout(sys.stderr):  # a directory's own code may print
        answer = _answer(asked)
    print(json.dumps(answer))


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    logging.disable(logging.WARNING)  # warnings of libraries during import
    config = from_plain(RunConfig, asked["config"])
    try:
        return {"found": _look(Question(asked["question"]), config, Path(asked["folder"]))}
    except TrainctlError as error:
        (found,) = error.findings or (
            Finding(
                rule=NOT_TRACED,
                key=_key(config),
                message=error.message,
                hint=error.hint,
                exit_code=error.exit_code,
            ),
        )
        return {"error": asdict(found)}


def _look(question: Question, config: RunConfig, folder: Path) -> Any:
    try:
        from trainctl.data.user_functions import make_importable
        from trainctl.train.models.anatomy import anatomy
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
    if question is Question.anatomy:
        return anatomy(config.model).to_table()
    return trace(config).to_json()


def _key(config: RunConfig) -> str:
    return "model.path" if config.model.factory is None else "model.factory"


if __name__ == "__main__":
    main()
