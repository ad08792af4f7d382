"""Rewards as users write them, good ones and bad ones, for `test_rewards`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def count_letters(
    prompt: str, answer: str, columns: Mapping[str, Any], letter: str = "a"
) -> float | None:
    """Return the share of a letter; None for an empty answer."""
    return answer.count(letter) / len(answer) if answer else None


def misbehave(prompt: str, answer: str, columns: Mapping[str, Any]) -> Any:
    """Do what the answer says."""
    match answer:
        case "raise":
            raise ValueError(f"no answer to {prompt}")
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(7)
        case "hang":
            subprocess.Popen(["sleep", "60"])
            Path(columns["pid_file"]).write_text(str(os.getpid()))
            time.sleep(600)
        case "fill":
            return len(bytearray(1 << 40))
        case "text":
            return "1.0"
        case "nan":
            return float("nan")
        case "none":
            return None
        case "print":
            print("{}", flush=True)
    return columns["tokens"] if "tokens" in columns else columns["answer_tokens"]


def write_to_its_parent(prompt: str, answer: str, columns: Mapping[str, Any]) -> float:
    """Write what the prompt says to the connection, or fork, and return the answer as a number."""
    if prompt == "fork":
        os.fork()
    for link in Path("/proc/self/fd").iterdir() if prompt else ():
        try:
            if str(link.readlink()).startswith("socket:"):
                os.write(int(link.name), bytes.fromhex(prompt))
        except (OSError, ValueError):
            continue
    return float(answer)
