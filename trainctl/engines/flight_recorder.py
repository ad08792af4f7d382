"""This rank's last collectives, for the agent that looks why ranks hang or lost each other.

Torch's flight recorder keeps them: of gloo in newer versions, of NCCL in builds for CUDA. A rank
writes them to a file when it gets SIGUSR1, and before it ends by an exception.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from trainctl.runs.files import ensure_folder, write_text

MOST_CALLS = 500
"""Last collectives that are written, about 100 bytes each: enough to see where ranks parted."""
_TYPES = {
    "BFloat16": "bfloat16",
    "Byte": "uint8",
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "Int": "int32",
    "Long": "int64",
}


def answer_requests(path: Path, request: Path) -> None:
    """Write all stacks to stderr at SIGUSR1, and the record to `path` if `request` exists.

    Called on the main thread.

    Python runs signal handlers on the main thread, which may wait in native code. So a thread
    writes, which a byte in a pipe wakes: the interpreter writes it within the signal handler.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGUSR1, lambda *_: None)  # without a handler there is no byte
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)
    threading.Thread(
        target=_answer, args=(reader, path, request), name="flight recorder", daemon=True
    ).start()


def _answer(signals: int, path: Path, request: Path) -> None:
    while True:
        number = os.read(signals, 1)[0]
        # The record of a rank that has failed stays.
        if number == signal.SIGUSR1 and request.exists() and not path.exists():
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            write_record(path, traceback.walk_stack(frame))


def write_failed_record(path: Path, error: BaseException) -> None:
    """Write the record of a rank that an exception ends, with the stack of the exception."""
    write_record(path, [*traceback.walk_tb(error.__traceback__)][::-1], has_failed=True)


def write_record(
    path: Path, frames: Iterable[tuple[FrameType, int]], *, has_failed: bool = False
) -> None:
    """Write this rank's collectives, its process groups, and its stack.

    Args:
        frames: Frames of the main thread with their lines, innermost first.
        has_failed: Whether the last collective failed; torch counts it as done.
    """
    groups: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    # What torch cannot tell, or a full disk, must not hide why the rank ends.
    with suppress(Exception):
        if "torch.distributed.distributed_c10d" in sys.modules:  # else it is still importing
            groups, calls = _groups(), _calls()
    if has_failed:
        for call in [call for call in calls if call["is_main"]][-1:]:
            call["is_done"] = False
    stack = [
        f'  File "{at.f_code.co_filename}", line {line} in {at.f_code.co_name}'
        for at, line in frames
    ]
    with suppress(OSError):
        record = {"groups": groups, "calls": calls, "stack": stack}
        ensure_folder(path.parent)
        write_text(path, json.dumps(record))


def _groups() -> dict[str, dict[str, Any]]:
    """Return global ranks and description of each process group of this rank, by its name."""
    from torch.distributed import distributed_c10d

    return {
        group.group_name: {"ranks": list(ranks), "description": group.group_desc}
        for group, ranks in list(distributed_c10d._world.pg_group_ranks.items())
        if isinstance(group, distributed_c10d.ProcessGroup)  # groups without this rank are listed
    }


def _calls() -> list[dict[str, Any]]:
    """Return the last collectives of this rank in the order of their calls.

    Without those between two ranks alone, whose numbers count for each pair.
    """
    from torch._C import _distributed_c10d as c10d

    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if hasattr(c10d, name):  # with TORCH_FR_BUFFER_SIZE=0 there are no entries
            entries += json.loads(getattr(c10d, name)(True, False)).get("entries", [])
    entries.sort(key=lambda entry: entry["time_created_ns"])
    main = str(threading.main_thread().ident)
    return [
        {
            "group": entry["process_group"][0],
            "sequence": entry["collective_seq_id"],
            "operation": entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
            "types": [_TYPES.get(name, name.lower()) for name in entry["input_dtypes"]],
            "sizes": entry["input_sizes"],
            "is_done": entry["retired"],
            "is_main": entry.get("thread_id", main) == main,
        }
        for entry in entries[-MOST_CALLS:]
        if not entry["is_p2p"]
    ]
