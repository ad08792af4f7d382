"""Provenance of a run: revision, packages, machine and environment, without secrets."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainctl.config import secrets
from trainctl.config.secrets import REDACTED, is_secret_name, redact_words

_URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+(?=@)")

_RECORDED_VARIABLES = (
    "CONDA_DEFAULT_ENV",
    "CUDA_*",
    "DS_*",
    "GLOO_*",
    "HF_*",
    "HOSTNAME",
    "LD_LIBRARY_PATH",
    "MKL_*",
    "NCCL_*",
    "NVIDIA_VISIBLE_DEVICES",
    "OMP_*",
    "PATH",
    "PYTHON*",
    "PYTORCH_*",
    "ROCR_VISIBLE_DEVICES",
    "SLURM_*",
    "TORCH_*",
    "VIRTUAL_ENV",
)
_GIT_SECONDS = 10
_PATCH_BYTES = 20_000_000
_UNTRACKED_NAMES = 200


def redact_environment(
    environment: Mapping[str, str], hidden: Collection[str] = ()
) -> dict[str, str]:
    """Return the variables with values of secret names, and credentials inside URLs, redacted.

    Args:
        hidden: Further names whose values are redacted.
    """
    return {
        name: REDACTED if name in hidden or is_secret_name(name) else redact_text(value)
        for name, value in environment.items()
    }


def redact_text(text: str) -> str:
    """Return the text with credentials of URLs, and values of secret names, redacted."""
    return secrets.redact_text(_URL_CREDENTIALS.sub(REDACTED, text))


def redact_argv(argv: Sequence[str]) -> list[str]:
    """Return a command line with values of secret names, and credentials of URLs, redacted."""
    return [redact_text(word) for word in redact_words(argv)]


def select_variables(environment: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    """Return the variables whose names match one of the globs, sorted."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def environment_record(environment: Mapping[str, str], forwarded: Sequence[str]) -> dict[str, str]:
    """Return the variables to record: an allow-list and what the run forwards, redacted."""
    return redact_environment(select_variables(environment, (*_RECORDED_VARIABLES, *forwarded)))


def package_versions() -> dict[str, str]:
    """Return every installed distribution and its version, sorted by name."""
    from importlib import metadata

    found = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found[name] = distribution.version
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def machine_facts() -> dict[str, Any]:
    """Return host, operating system, Python and number of usable CPU cores."""
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "cpus": len(os.sched_getaffinity(0)),
    }


def file_digest(path: Path) -> str:
    """Return a checksum of a file's content; empty if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        return ""


def git_state(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the git state of a folder, and its uncommitted changes.

    Returns:
        Revision, branch, remote, whether there are uncommitted changes, and names of untracked
        files (None if it is no checkout, or git is not installed or does not answer); and the
        uncommitted changes of tracked files as a patch.
    """
    revision = _git(folder, "rev-parse", "HEAD")
    if revision is None:
        return None, ""
    plain = ("--binary", "--no-ext-diff", "--no-textconv", "--no-color")
    patch = _git(folder, "diff", "HEAD", *plain) or ""
    untracked = (_git(folder, "ls-files", "--others", "--exclude-standard") or "").splitlines()
    is_whole = len(patch.encode()) <= _PATCH_BYTES
    state = {
        "revision": revision.strip(),
        "branch": (_git(folder, "rev-parse", "--abbrev-ref", "HEAD") or "").strip(),
        "remote": redact_text((_git(folder, "remote", "get-url", "origin") or "").strip()),
        "changed": bool(patch),
        "patch_recorded": bool(patch) and is_whole,
        "untracked": untracked[:_UNTRACKED_NAMES],
        "untracked_count": len(untracked),
    }
    return state, patch if is_whole else ""


def own_checkout() -> dict[str, Any] | None:
    """Return the revision of trainctl's own code, and whether it has uncommitted changes.

    None for an installed copy, even one that lies in somebody else's checkout.
    """
    package = Path(__file__).parents[1]
    if not _git(package, "ls-files", "__init__.py"):
        return None
    revision = _git(package, "rev-parse", "HEAD")
    if revision is None:
        return None
    changes = _git(package, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return {"revision": revision.strip(), "changed": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a read-only git command that never prompts; None if it fails."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        result = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.decode(errors="replace")
