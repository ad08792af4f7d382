"""Do a store's tasks: in this process, in others of this machine, and beside other machines.

All of them do the same: take the next task that nobody has claimed, until every task is done. So
there is no queue and no coordinator, and starting the same command on another machine helps.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from trainctl.config.codec import to_plain
from trainctl.config.schema import TokenizerConfig
from trainctl.data.store import DamagedPart, TokenStore
from trainctl.data.tasks import PreparationMeter, Progress, Task, ignore_progress
from trainctl.data.tokenizer import dtype_for
from trainctl.errors import ExitCode, TrainctlError
from trainctl.readers.documents import Reader
from trainctl.readers.stream import is_compressed
from trainctl.runs.processes import PARENT_VARIABLE

_WORTH_A_PROCESS = 8 << 20
"""Bytes of text per additional process: starting one takes as long as tokenizing some
of them.
"""
_POLL_SECONDS = 0.2


def run_tasks(
    store: TokenStore,
    tasks: Sequence[Task],
    *,
    section: TokenizerConfig | None = None,
    workers: int | None = None,
    show: Progress = ignore_progress,
) -> None:
    """Have every task done; finished tasks are skipped.

    Args:
        section: Tokenizer section for worker processes to load; None does all work in this process.
        workers: Number of processes; None uses as many as are worth their start, up to one per
            core.

    Raises:
        TrainctlError: As `TokenStore.do`; or the disk has too little space (exit code 4).
    """
    open_tasks = [task for task in tasks if not store.is_done(task)]
    if open_tasks:
        require_space(store, tasks, open_tasks)
        count = worker_count(open_tasks, workers) if section is not None else 1
        if count > 1 and section is not None:
            _run_in_processes(store, open_tasks, section, count, show)
        else:
            run_unclaimed_tasks(store, open_tasks, show)
    store.finish(tasks)


def run_unclaimed_tasks(
    store: TokenStore, tasks: Sequence[Task], show: Progress = ignore_progress
) -> None:
    """Do unclaimed tasks in this process until all tasks are done, by any process."""
    left = [task for task in tasks if not store.is_done(task)]
    meter = PreparationMeter(sum(task.size for task in left), show)
    while left:
        before = len(left)
        for task in left:
            if store.is_done(task):
                continue
            with store.claims.held(task.key) as is_ours:
                if is_ours and not store.is_done(task):
                    store.do(task, meter.document)
                    meter.task(task.size)
        left = [task for task in left if not store.is_done(task)]
        if len(left) == before:
            time.sleep(_POLL_SECONDS)


def available_cores() -> int:
    """Return the number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0))


def worker_count(tasks: Sequence[Task], workers: int | None) -> int:
    """Return the number of processes that are worth their start, at least 1.

    `workers` is the number that the user wants; None means up to one per core.
    """
    if workers is not None:
        return max(1, min(workers, len(tasks)))
    size = sum(task.size for task in tasks)
    return max(1, min(available_cores(), len(tasks), size // _WORTH_A_PROCESS))


def _run_in_processes(
    store: TokenStore, tasks: Sequence[Task], section: TokenizerConfig, count: int, show: Progress
) -> None:
    """Run worker processes until all tasks are done, and kill them on any error.

    They die with this process even if it is killed.
    """
    job = {
        "folder": str(store.folder),
        "data": to_plain(store.config),
        "tokenizer": to_plain(section),
        "tasks": [task.to_plain() for task in tasks],
    }
    text = json.dumps(job).encode()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes += (_start_workers(count) for _ in range(count))
        for process in processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended: `_watch_workers` finds its exit code
                process.stdin.write(text)
                process.stdin.close()
        _watch_workers(store, tasks, processes, show)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # a dead process has not read its input
                    assert pipe is not None
                    pipe.close()


def _start_workers(count: int) -> subprocess.Popen[bytes]:
    threads = str(max(1, available_cores() // count))
    environment = {
        "RAYON_NUM_THREADS": threads,  # for the tokenizers library
        **os.environ,
        PARENT_VARIABLE: str(os.getpid()),
    }
    command = [sys.executable, "-P", "-m", "trainctl.data"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)


def _watch_workers(
    store: TokenStore,
    tasks: Sequence[Task],
    processes: Sequence[subprocess.Popen[bytes]],
    show: Progress,
) -> None:
    """Report progress until all processes have ended without an error.

    Raises:
        TrainctlError: The error of a process; or a process was killed (exit code 4).
    """
    left = list(tasks)
    meter = PreparationMeter(sum(task.size for task in left), show)
    while True:
        codes = [process.poll() for process in processes]
        for process, code in zip(processes, codes, strict=True):
            if code:
                raise _process_error(process, code)
        looked = time.monotonic()
        done = [task for task in left if store.is_done(task)]
        for task in done:
            meter.task(task.size, store.documents_in(task))
        keys = {task.key for task in done}
        left = [task for task in left if task.key not in keys]
        if all(code == 0 for code in codes):
            return
        # Checking 100,000 tasks takes a while and loads a shared disk: wait longer then.
        time.sleep(max(_POLL_SECONDS, 10 * (time.monotonic() - looked)))


def _process_error(process: subprocess.Popen[bytes], code: int) -> TrainctlError:
    assert process.stdout is not None
    answer: dict[str, Any] = {}
    with suppress(ValueError):
        answer = json.loads(process.stdout.read())
    if not answer:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return TrainctlError(
            f"a process that tokenized {how}",
            hint="start again: what it had finished is kept; fewer of them need less memory",
            exit_code=ExitCode.environment,
        )
    exit_code = ExitCode(answer["exit_code"])
    return TrainctlError(answer["message"], hint=answer["hint"], exit_code=exit_code)


_OF_A_DOCUMENT = 40
"""Bytes per document besides its tokens: end, origin and hash in the store, and end in the
corpus.
"""
_SAMPLE = 1 << 18
"""Characters tokenized to estimate tokens per byte, if nothing has been tokenized yet."""
_UNPACKED = 3.0
"""Minimum bytes of text per byte of a compressed file."""


def space_needed(store: TokenStore, tasks: Sequence[Task], left: Sequence[Task]) -> int:
    """Estimate the bytes that the open tasks `left` and the corpus of all `tasks` will take.

    A part stores its tokens, and the corpus stores them a second time.
    """
    share = _bytes_per_byte(store, tasks)
    return round(share * sum(task.size for task in [*tasks, *left]))


def require_space(store: TokenStore, tasks: Sequence[Task], left: Sequence[Task]) -> None:
    """Refuse to start if the disk has too little room."""
    needed = space_needed(store, tasks, left)
    free = _free_bytes(store.folder)
    if needed > free:
        raise TrainctlError(
            f"{store.folder.parent} has {free / 1e9:,.2f} GB free, and the tokens of this text "
            f"will take about {needed / 1e9:,.2f} GB there",
            hint="free space there, or name another folder in TRAINCTL_CACHE_DIR",
            exit_code=ExitCode.environment,
        )


def _bytes_per_byte(store: TokenStore, tasks: Sequence[Task]) -> float:
    """Return the bytes written per byte of the files, from finished tasks or from a sample."""
    done = [task for task in islice(tasks, 1000) if store.is_done(task)]
    size = sum(task.size for task in done)
    if size:
        try:
            parts = [store.part(task) for task in done]
        except DamagedPart:
            parts = []
        if parts:
            return sum(_on_disk(part.folder) for part in parts) / size
    return _sampled_write_ratio(store, tasks)


def _on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _sampled_write_ratio(store: TokenStore, tasks: Sequence[Task]) -> float:
    """Estimate bytes written per byte from the first documents. Errors in them are ignored here."""
    texts: list[str] = []
    room = _SAMPLE
    try:
        for piece in (piece for task in tasks for piece in task.pieces):
            for document in Reader(store.config).read(piece.file, piece.span):
                texts.append(document.text[:room])
                room -= len(texts[-1])
                if room <= 0:
                    break
            if room <= 0:
                break
    except TrainctlError:
        pass
    size = sum(len(text.encode()) for text in texts)
    if not size:
        return 1.0
    ids = sum(len(each) for each in store.tokenizer.encode_all(texts))
    width = np.dtype(dtype_for(store.tokenizer.vocab_size)).itemsize
    unpacked = _UNPACKED if is_compressed(tasks[0].pieces[0].file) else 1.0
    return (ids * width + len(texts) * _OF_A_DOCUMENT) / size * unpacked


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
