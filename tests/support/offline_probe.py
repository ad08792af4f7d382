"""Runs inside a forked process for `test_offline`: all of `python -m trainctl.train.offline`."""

from __future__ import annotations

import os
import sys
import tempfile

from trainctl.train import offline


def answer(arguments: list[str]) -> tuple[int, str]:
    """Return its exit code and the last line of its answers, which go to its standard output."""
    sys.argv[1:] = arguments
    with tempfile.TemporaryFile("w+") as answers:
        os.dup2(answers.fileno(), 1)
        code = offline.answer(offline.TASKS)
        answers.seek(0)
        return int(code), answers.read().splitlines()[-1]
