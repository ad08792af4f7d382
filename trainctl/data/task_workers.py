"""Have a store's tasks done by an executor, and check the disk for them first.

On one machine every process claims its task, so that the same command on another machine, or on
another node of a launch, does other tasks. An executor with machines of its own gives each task to
one process by itself, whose claim only keeps others away.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path

import numpy as np

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.registry import function_of
from trainctl.config.schema import TokenizerConfig
from trainctl.data.executors import INLINE, Executor, ExecutorTask, LocalExecutor, require_results
from trainctl.data.store import DamagedPart, TokenStore
from trainctl.data.tasks import OnPreparation, PreparationMeter, Task
from trainctl.data.tokenizer import dtype_for, encoder_of
from trainctl.errors import MachineError, TrainctlError
from trainctl.options.data import read_section
from trainctl.readers.documents import Reader
from trainctl.readers.stream import is_compressed
from trainctl.runs.records import ignore_progress

_POLL_SECONDS = 0.2


def run_tasks(
    store: TokenStore,
    tasks: Sequence[Task],
    *,
    executor: Executor = INLINE,
    section: TokenizerConfig | None = None,
    show: OnPreparation = ignore_progress,
) -> None:
    """Have every task done; finished tasks are skipped.

    Args:
        section: Tokenizer section for other processes to load; None does all work in this process.

    Raises:
        TrainctlError: As `TokenStore.do` and `Executor.run`; or the disk has too little space (exit
            code 4).
    """
    left = [task for task in tasks if not store.is_done(task)]
    if left:
        require_space(store, tasks, left)
        _run_open_tasks(store, left, executor if section is not None else INLINE, section, show)
    store.finish(tasks)


def _run_open_tasks(
    store: TokenStore,
    tasks: Sequence[Task],
    executor: Executor,
    section: TokenizerConfig | None,
    show: OnPreparation,
) -> None:
    """Run tasks until all are done, here or by another process that has claimed them."""
    meter = PreparationMeter(sum(task.size for task in tasks), show)
    left = {task.key: task for task in tasks}
    sizes = [task.size for task in tasks]
    is_inline = isinstance(executor, LocalExecutor) and executor.process_count(sizes) == 1
    runner: Executor = INLINE if is_inline else executor
    job = "" if is_inline else _job_text(store, section)

    def call(task: Task) -> Callable[[], object]:
        if runner is INLINE:
            return partial(_do_if_unclaimed, store, task, meter.document)
        return partial(tokenize_task, job, json.dumps(task.to_plain()), executor.is_shared)

    def done(task: ExecutorTask) -> None:
        if task.name in left and store.is_done(left[task.name]):
            finished = left.pop(task.name)
            meter.task(finished.size, 0 if runner is INLINE else store.documents_in(finished))

    while left:
        before = len(left)
        calls = [ExecutorTask(task.key, call(task), task.size) for task in left.values()]
        runner.run(calls, done)
        require_results(runner, list(left), lambda key: store.is_done(left[key]), store.folder)
        for task in calls:
            done(task)  # another process has done it meanwhile
        is_stalled = len(left) == before
        if is_stalled:
            time.sleep(_POLL_SECONDS)
        # Where others have claimed all that is left, there is no work for new processes.
        runner = INLINE if is_inline or is_stalled else executor


def _do_if_unclaimed(
    store: TokenStore, task: Task, progress: Callable[[int], None] = lambda _: None
) -> None:
    if not store.is_done(task):
        with store.claims.held(task.key) as is_ours:
            if is_ours and not store.is_done(task):
                store.remove_leftovers(task)
                store.do(task, progress)


def _job_text(store: TokenStore, section: TokenizerConfig | None) -> str:
    """Return what every process needs to know of a store, as JSON."""
    job = {
        "folder": str(store.folder),
        "data": to_plain(store.config),
        "tokenizer": to_plain(section),
    }
    return json.dumps(job)


def tokenize_task(job: str, task: str, is_assigned: bool) -> None:
    """Do a task in another process than the one that planned it.

    Args:
        job: From `_job_text`.
        task: `Task.to_plain` as JSON.
        is_assigned: Whether an executor gave it to this process, whoever has claimed it.
    """
    store, todo = _open_store(job), Task.from_plain(json.loads(task))
    if not is_assigned:
        _do_if_unclaimed(store, todo)
    elif not store.is_done(todo):
        with store.claims.held(todo.key):
            store.do(todo)


@lru_cache(maxsize=4)
def _open_store(job: str) -> TokenStore:
    plain = json.loads(job)
    section = from_plain(TokenizerConfig, plain["tokenizer"])
    data = read_section(plain["data"])
    tokenizer = encoder_of(data, function_of("tokenizer", section.kind)(section))
    return TokenStore(Path(plain["folder"]), data, tokenizer)


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
        raise MachineError(
            f"{store.folder.parent} has {free / 1e9:,.2f} GB free, and the tokens of this text "
            f"will take about {needed / 1e9:,.2f} GB there",
            hint="free space there, or name another folder in TRAINCTL_CACHE_DIR",
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
            files = (file for part in parts for file in part.folder.iterdir())
            return sum(file.stat().st_size for file in files) / size
    return _sampled_write_ratio(store, tasks)


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
