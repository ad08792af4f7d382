"""Commands of schedulers, run to their end."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Sequence

from trainctl.errors import MachineError

_SECONDS = 60


def run_tool(
    command: Sequence[str], *, seconds: float = _SECONDS, accepted: Collection[int] = ()
) -> str:
    """Run a scheduler's command to its end, and return its output.

    Args:
        accepted: Exit codes besides 0 that are no failure of the command.

    Raises:
        TrainctlError: It is not installed, fails, or does not end in time (exit code 4).
    """
    try:
        done = subprocess.run(command, input="", capture_output=True, text=True, timeout=seconds)
    except FileNotFoundError:
        raise MachineError(
            f"{command[0]} is not installed on this machine",
            hint=f"repeat this where {command[0]} is",
        ) from None
    except subprocess.TimeoutExpired:
        raise MachineError(f"{command[0]} does not answer") from None
    if done.returncode not in (0, *accepted):
        output = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise MachineError(
            f"{command[0]} failed: {output[-1] if output else f'exit code {done.returncode}'}"
        )
    return done.stdout
