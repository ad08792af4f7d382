"""`python -m trainctl.train.trace_entry`: trace the model of a configuration from standard input.

Called by `trainctl.config.tracing`; the last line of standard output is the answer.
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
from trainctl.config.tracing import NOT_TRACED
from trainctl.errors import Finding, TrainctlError


def main() -> None:
    """Read the question, write the answer: what was traced, or why it cannot be."""
    asked = json.load(sys.stdin)
    with redirect_stdout(sys.stderr):  # code of a directory's own may print
        answer = _answer(asked)
    print(json.dumps(answer))


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    logging.disable(logging.WARNING)  # what the libraries say while they are imported
    from trainctl.train.trace import trace

    config = from_plain(RunConfig, asked["config"])
    try:
        traced = trace(config, Path(asked["folder"]))
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
    return {"traced": traced.to_json()}


def _key(config: RunConfig) -> str:
    return "model.path" if config.model.factory is None else "model.factory"


if __name__ == "__main__":
    main()
