"""Worker that tokenizes for another process: `python -m trainctl.data`, with its job on stdin."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

from trainctl.config.codec import from_plain
from trainctl.config.registry import function_of
from trainctl.config.schema import TokenizerConfig
from trainctl.data.store import TokenStore
from trainctl.data.task_workers import run_unclaimed_tasks
from trainctl.data.tasks import Task
from trainctl.data.tokenizer import encoder_of
from trainctl.errors import TrainctlError
from trainctl.options.data import read_section
from trainctl.runs.processes import die_with_parent


def main() -> int:
    """Do the job on stdin. A user's error is printed to stdout as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    die_with_parent()
    job: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    try:
        section = from_plain(TokenizerConfig, job["tokenizer"])
        data = read_section(job["data"])
        tokenizer = encoder_of(data, function_of("tokenizer", section.kind)(section))
        store = TokenStore(Path(job["folder"]), data, tokenizer)
        run_unclaimed_tasks(store, [Task.from_plain(task) for task in job["tasks"]])
    except TrainctlError as error:
        answer = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
        print(json.dumps(answer), flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
