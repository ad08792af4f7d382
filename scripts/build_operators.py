"""Compile the native DeepSpeed operators that the tests use, and print how long each took.

    python scripts/build_operators.py

DeepSpeed compiles an operator at its first use, into the cache of torch's cpp_extension. That takes
up to two minutes on all cores, which would disturb tests that measure time. An operator that is
already built costs a second. The lock of a killed build is removed first, because torch would wait
for it forever. The exit code is 1 if an operator cannot be built.

Where torch compiles by ccache, what a debugger reads is left out. DeepSpeed asks for it (`-g`), and
it is almost half of the work. The build files keep DeepSpeed's commands, so nothing is compiled
again at the first use.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from trainctl.hardware.builds import build_folders, is_stale_lock, tools_path

OPERATORS = {
    "CPUAdamBuilder": "AdamW in host memory",
    "CPULionBuilder": "Lion in host memory",
    "AsyncIOBuilder": "offload to NVMe; builds pinned memory too",
    "ShareMemCommBuilder": "programs that leave communication to DeepSpeed",
}
"""DeepSpeed's builders for a CPU (deepspeed/ops/op_builder/cpu), and the tests that need each."""

FOLDERS = ("cpu_adam", "cpu_lion", "async_io", "pin_memory", "deepspeed_shm_comm")
"""Build folders of torch's cpp_extension."""


def main() -> int:
    """Build every operator that is not built yet."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["PATH"] = tools_path()
    for lock in (folder / "lock" for name in FOLDERS for folder in build_folders(name)):
        if is_stale_lock(lock):
            print(f"removed {lock}, which a killed build left", flush=True)
            lock.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        compiler = Path(folder, "compile")
        compiler.write_text('#!/bin/sh\nexec "$@" -g0\n')
        compiler.chmod(0o700)
        os.environ["CCACHE_PREFIX"] = str(compiler)
        os.environ["CCACHE_DEPEND"] = "1"  # no second reading of the headers, to look for a result
        return build()


def build() -> int:
    """Return 1 if an operator cannot be built, else 0."""
    from deepspeed.accelerator import get_accelerator

    failed = 0
    for name, use in OPERATORS.items():
        start = time.monotonic()
        try:
            get_accelerator().create_op_builder(name).load(verbose=False)
        except Exception as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = 1
        else:
            print(f"{name} ({use}): {time.monotonic() - start:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
