"""Checks that DeepSpeed can compile its native operators here, before a rank waits for them.

DeepSpeed builds its native operators when they are first used (deepspeed/ops/op_builder), by
torch's cpp_extension, and keeps them in a cache.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from trainctl.config.reading import local_path
from trainctl.config.schema import Accelerator, CompileKind, OffloadDevice, RunConfig
from trainctl.errors import Finding
from trainctl.hardware.detect import Hardware, error_finding
from trainctl.hardware.packages import packaged_text, torch_build
from trainctl.hardware.storage import REMOTE, filesystem_type
from trainctl.options.engine import engine_of
from trainctl.options.optimizer import Maker, spec_of

_COMPILE_SECONDS = 60.0

HOST_OPERATORS = frozenset({"cpu_adam", "cpu_lion", "async_io"})
"""Operators that can be built without CUDA."""

_LONGEST_BUILD_SECONDS = 3600.0
"""No operator takes an hour to compile: an older lock was left by a killed build."""


def needed_operators(config: RunConfig, hardware: Hardware) -> dict[str, str]:
    """Return the DeepSpeed operators that the run must compile, each with the key that requires it.

    Operators that were compiled when DeepSpeed was installed are left out.
    """
    if not engine_of(config).takes_json:
        return {}
    offload, optimizer = config.offload, spec_of(config.optimizer)
    on_cpu = hardware.accelerator is Accelerator.cpu
    wanted: dict[str, str] = {}
    if offload.optimizer is not OffloadDevice.none:
        if optimizer.host_operator or not config.trains_itself:
            wanted[optimizer.host_operator or "cpu_adam"] = "offload.optimizer"
    elif optimizer.device_operator and not on_cpu:
        is_wanted = optimizer.fused_by is Maker.deepspeed and config.optimizer.fused is not False
        if is_wanted or not config.trains_itself:
            wanted[optimizer.device_operator] = "optimizer.kind"
    for key in ("optimizer", "parameters"):
        if getattr(offload, key) is OffloadDevice.nvme:
            wanted["async_io"] = f"offload.{key}"
    for key in ("quantized_weights", "quantized_gradients"):
        if getattr(config.zero_stage, key):
            wanted["quantizer"] = f"zero_stage.{key}"
    if config.kernels.compile is CompileKind.deepcompile and not on_cpu:
        wanted["dc"] = "kernels.compile"
    if on_cpu and not config.trains_itself:
        # Trainctl's own trainer disables it (engines/deepspeed/process.py).
        wanted["deepspeed_shm_comm"] = "script" if config.script is not None else "trainer"
    return {name: key for name, key in wanted.items() if not _prebuilt_operators().get(name)}


def build_problems(config: RunConfig, hardware: Hardware) -> list[Finding]:
    """Find everything that keeps DeepSpeed from compiling its operators on this machine."""
    checks = (
        check_compiler,
        check_libaio,
        check_build_locks,
        check_cuda_toolkit,
        check_architectures,
    )
    found = (each for check in checks for each in check(config, hardware))
    return [each for each in found if isinstance(each, Finding)]


def _prebuilt_operators() -> dict[str, bool]:
    """Return for each operator whether it was compiled when DeepSpeed was installed."""
    text = packaged_text("deepspeed", "deepspeed/git_version_info_installed.py") or ""
    found = re.search(r"^installed_ops\s*=\s*(\{.*\})", text, re.MULTILINE)
    return dict(ast.literal_eval(found[1])) if found else {}


def check_compiler(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find a missing C++ compiler, ninja or Python.h, if operators have to be compiled."""
    operators = needed_operators(config, hardware)
    if not operators:
        return
    names, key = ", ".join(operators), next(iter(operators.values()))
    compiler = _extension_compiler()
    missing = []
    if shutil.which(compiler) is None:
        missing.append((f"no C++ compiler ({compiler})", "apt install g++"))
    if shutil.which("ninja", path=tools_path()) is None:
        missing.append(("no ninja", "pip install ninja"))
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        missing.append(("no Python.h", "apt install python3-dev"))
    for what, fix in missing:
        yield error_finding(
            "TC126", key, f"DeepSpeed has to compile {names}, and there is {what} here", fix
        )
    if not missing:
        yield f"{compiler}, to compile {names} at the first use"


def tools_path() -> str:
    """Return the PATH of ranks, with the folder of this Python's executable at the end.

    Tools of trainctl's environment (ninja) are then found although it is not activated.
    """
    return os.pathsep.join((os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)))


def check_libaio(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find a missing libaio: async_io needs its library and header."""
    key = needed_operators(config, hardware).get("async_io")
    if key is None or shutil.which(_extension_compiler()) is None:
        return
    if can_link("#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n", "-laio"):
        yield "its header and library are here"
        return
    yield error_finding(
        "TC127",
        key,
        "DeepSpeed's async_io needs libaio, and a program that uses it does not compile here",
        "apt install libaio-dev; or name its folders in CFLAGS (-I) and LDFLAGS (-L)",
    )


def check_build_locks(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find stale locks of killed builds.

    Every later build would wait for such a lock forever, silently (torch/utils/file_baton.py).
    """
    for operator, key in needed_operators(config, hardware).items():
        for lock in (folder / "lock" for folder in build_folders(operator)):
            if is_stale_lock(lock):
                yield error_finding(
                    "TC137",
                    key,
                    f"a build of DeepSpeed's {operator} was killed; its lock would hold up this "
                    "run for ever",
                    f"rm {shlex.quote(str(lock))}",
                )


def is_stale_lock(lock: Path) -> bool:
    """Return True if the build that made this lock was killed.

    Torch holds the lock open while it builds (torch/utils/file_baton.py), and ninja and compilers
    work in its folder. Processes of other machines and other users cannot be seen: their locks
    count as stale after an hour.
    """
    try:
        made = lock.stat()
    except OSError:
        return False
    if os.geteuid() not in (0, made.st_uid) or filesystem_type(lock.parent) in REMOTE:
        return time.time() - made.st_mtime > _LONGEST_BUILD_SECONDS
    return not _is_building(lock) and lock.exists()


def _is_building(lock: Path) -> bool:
    """Whether a process holds the lock open, or works in its folder."""
    path = lock.resolve()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.cwd() == str(path.parent) or path in locks_held_by(process.pid):
                return True
    return False


def locks_held_by(pid: int) -> set[Path]:
    """Return the build locks that a process of this machine holds open."""
    held = set()
    with suppress(OSError):  # the process has ended, or is another user's
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = descriptor.readlink()
                if target.name == "lock":
                    held.add(target)
    return held


def build_folders(operator: str) -> list[Path]:
    """Return the folders where torch's cpp_extension has built an operator, or is building it.

    There is one for each Python version and kind of device, or a single one under
    TORCH_EXTENSIONS_DIR. `operator` may be a glob pattern: `*` finds all operators.
    """
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return sorted(Path(named).glob(operator))
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return sorted((local_path(cache) / "torch_extensions").glob(f"*/{operator}"))
    except OSError:  # no such folder
        return []


def check_cuda_toolkit(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find a CUDA toolkit that is missing or of another major version than torch's.

    DeepSpeed refuses the latter (op_builder/builder.py).
    """
    operators = needed_operators(config, hardware)
    build = torch_build()
    if not operators or hardware.accelerator is not Accelerator.cuda or not (build and build[0]):
        return
    names, key = ", ".join(operators), next(iter(operators.values()))
    release = toolkit_release()
    if release is None:
        # Operators for the host are then built without CUDA; others cannot be built.
        if set(operators) <= HOST_OPERATORS:
            yield f"none here; {names} can do without"
            return
        yield error_finding(
            "TC128",
            key,
            f"DeepSpeed has to compile {names}, and there is no CUDA toolkit (nvcc) here",
            f"install the toolkit of CUDA {build[0]}, and set CUDA_HOME",
        )
    elif release.partition(".")[0] == build[0].partition(".")[0]:
        yield f"{release}, torch's is {build[0]}"
    elif os.environ.get("DS_SKIP_CUDA_CHECK") != "1":
        yield error_finding(
            "TC128",
            key,
            f"DeepSpeed has to compile {names}; the CUDA toolkit here is {release}, and torch "
            f"was built for {build[0]}",
            f"CUDA_HOME=the toolkit of CUDA {build[0].partition('.')[0]}, or unset it",
        )


def check_architectures(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find a TORCH_CUDA_ARCH_LIST that DeepSpeed cannot read: `9.0a`, which images for H100 set.

    DeepSpeed takes each part of it for a number (op_builder/builder.py, 0.19.8).
    """
    operators = {
        name: key
        for name, key in needed_operators(config, hardware).items()
        if name not in HOST_OPERATORS
    }
    named = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    readable = re.sub(r"(\d+\.\d+)[a-z]+", r"\1", named)
    if not operators or hardware.accelerator is not Accelerator.cuda or readable == named:
        return
    yield error_finding(
        "TC128",
        next(iter(operators.values())),
        f"DeepSpeed has to compile {', '.join(operators)}, and cannot read "
        f"TORCH_CUDA_ARCH_LIST={named}",
        f"TORCH_CUDA_ARCH_LIST={shlex.quote(readable)}",
    )


def toolkit_release() -> str | None:
    """Return the release of the CUDA toolkit that torch's cpp_extension finds, such as ``12.8``."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc")
    nvcc = f"{home}/bin/nvcc" if home else found or "/usr/local/cuda/bin/nvcc"
    try:
        done = subprocess.run([nvcc, "-V"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"release (\d+\.\d+)", done.stdout)
    return match[1] if match else None


def can_link(source: str, *libraries: str) -> bool:
    """Whether a C program compiles and links here, with CFLAGS and LDFLAGS of the environment."""
    flags = [*os.environ.get("CFLAGS", "").split(), *os.environ.get("LDFLAGS", "").split()]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "program.c")
        file.write_text(source)
        command = [
            _extension_compiler(),
            "-x",
            "c",
            str(file),
            "-o",
            f"{folder}/program",
            *flags,
            *libraries,
        ]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_COMPILE_SECONDS)
        except (OSError, subprocess.SubprocessError):
            return False
    return done.returncode == 0


def _extension_compiler() -> str:
    """Return the C++ compiler that torch's cpp_extension calls."""
    return os.environ.get("CXX", "c++")
