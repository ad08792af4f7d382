"""Stand-in rank for tests of supervision: `stand_in.py BEHAVIOUR`, several joined by commas.

forever     write a step record every 50 ms, without end
steps       ten steps, then end well
torch       import torch first, as a real rank does
gloo        join a gloo group and all-reduce at each step
child       fork a child in a session of its own that would never end
worker      fork a child in the same session that ignores SIGTERM
stubborn    ignore SIGTERM
raise       rank 1 raises at the third step
shape       rank 1 all-reduces half of what the others do at the third step; records like a rank
segfault    rank 1 crashes in native code at the third step
processors  say which ones it may use
build       rank 0 compiles, as far as others can see it of torch's cpp_extension, until it is noted
saves       save a small checkpoint at every tenth step, go on from the newest, and rotate
obliging    save, as far as others can see it, and end when that is asked for
slow_exit   handle SIGTERM by ending a second later
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from trainctl.runs.processes import RunTag
from trainctl.runs.records import EventWriter, read_events

behaviour = set(sys.argv[1].split(","))
rank = int(os.environ["RANK"])
tag = RunTag.from_environment(os.environ)
records = Path(os.environ["TRAINCTL_RUN_DIR"], "events.jsonl")


def fork_child(*, own_session: bool) -> None:
    if os.fork() == 0:
        if own_session:
            os.setsid()
        else:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(60)


def wait_for_build_records(count: int) -> None:
    while len(read_events(records, "build")) < count:
        time.sleep(0.05)


if "child" in behaviour:
    fork_child(own_session=True)
if "worker" in behaviour:
    fork_child(own_session=False)
if "stubborn" in behaviour:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "slow_exit" in behaviour:
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), os._exit(0)))
if behaviour & {"torch", "gloo"}:
    import torch
    import torch.distributed as dist
if "gloo" in behaviour:
    dist.init_process_group("gloo")
if "shape" in behaviour:
    from trainctl.engines.flight_recorder import answer_requests, write_failed_record
    from trainctl.runs.layout import RunPaths

    attempt_paths = RunPaths(records.parent).attempt(tag.attempt)
    record = attempt_paths.flight_record(rank)
    answer_requests(record, attempt_paths.flight_request)
    (attempt_paths.root / "heartbeats").mkdir(exist_ok=True)
    attempt_paths.heartbeat(rank).touch()

print(f"rank {rank} of {os.environ['WORLD_SIZE']} is up", flush=True)
if "processors" in behaviour:
    print(f"processors {sorted(os.sched_getaffinity(0))}", flush=True)
if "build" in behaviour and rank == 0:
    from torch.utils.file_baton import FileBaton

    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"], "cpu_adam")
    folder.mkdir(parents=True)
    baton = FileBaton(str(folder / "lock"))
    assert baton.try_acquire()
    wait_for_build_records(1)
    (folder / "cpu_adam.so").touch()
    baton.release()
    wait_for_build_records(2)
first, last = 1, 10 if "steps" in behaviour else sys.maxsize
if "saves" in behaviour:
    from functools import partial

    from small_checkpoints import save

    from trainctl.runs import checkpoints
    from trainctl.runs.attempts import config_of
    from trainctl.runs.layout import RunPaths
    from trainctl.runs.mirror_state import kept_for_mirror

    run = RunPaths(records.parent)
    settings = config_of(run).checkpoint
    newest, _ = checkpoints.newest_checkpoint(run)
    first = newest.step + 1 if newest else 1
    if rank == 0:
        checkpoints.clean_temporary(run)
with EventWriter(records, tag.attempt) as events:
    if rank == 0:
        events.write("start", world_size=int(os.environ["WORLD_SIZE"]))
    for step in range(first, last + 1):
        if "shape" in behaviour and step == 3:
            try:
                dist.all_reduce(torch.ones(500 if rank == 1 else 1000))
            except RuntimeError as error:
                write_failed_record(record, error)
                raise
        if "gloo" in behaviour:
            dist.all_reduce(torch.ones(1))
        if rank == 1 and step == 3 and "raise" in behaviour:
            raise ValueError("the loss went through the roof")
        if rank == 1 and step == 3 and "segfault" in behaviour:
            ctypes.string_at(0)
        if rank == 0:
            events.write("step", step=step, loss=1.0 / step)
        if rank == 0 and step % 10 == 0 and "saves" in behaviour:
            save(run, step, files=4, numel=20_000 + step, attempt=tag.attempt)
            spare = partial(kept_for_mirror, run, keep=settings.keep)
            checkpoints.rotate_checkpoints(run, settings, spare=spare)
        if "obliging" in behaviour and (records.parent / "requests" / "stop").exists():
            last = step
            break
        time.sleep(0.05)
    if rank == 0:
        reason = "stop_requested" if "obliging" in behaviour else "complete"
        events.write("end", step=last, reason=reason)
