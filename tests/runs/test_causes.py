from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_runs import new_run

from trainctl.cli.runs import _why_lost
from trainctl.errors import TrainctlError
from trainctl.launchers import attempts
from trainctl.runs import failures, lock
from trainctl.runs.failures import (
    Cause,
    cause_of,
    describe_exit,
    disk_fault,
    exit_code,
    host_oom_kills,
)
from trainctl.runs.listing import summarise_run
from trainctl.runs.lock import hold_lock

# As torch 2.11 to 2.13, DeepSpeed 0.19 and the kernel say it.
ERRORS = [
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.", Cause.device_memory),
    ("RuntimeError: CUDA error: out of memory", Cause.device_memory),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", Cause.device_memory),
    ("MemoryError", Cause.host_memory),
    (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 8 bytes. Error code 12 (Cannot allocate memory)",
        Cause.host_memory,
    ),
    ("OSError: [Errno 28] No space left on device", Cause.disk_full),
    ("OSError: [Errno 27] File too large", Cause.disk_full),
    ("OSError: [Errno 30] Read-only file system: '/runs/a/steps'", Cause.read_only),
    (
        "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 600000ms for recv operation",
        Cause.communication_timeout,
    ),
    (
        "torch.distributed.DistBackendError: Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=5) ran for 600000 milliseconds before timing out.",
        Cause.communication_timeout,
    ),
    (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running",
        Cause.collective_mismatch,
    ),
    ("RuntimeError: Connection closed by peer [127.0.0.1]:9354", Cause.lost_peer),
    ("ValueError: no: good", Cause.code),
]


@pytest.mark.parametrize(("error", "cause"), ERRORS)
def test_the_cause_of_an_exception(error: str, cause: Cause) -> None:
    assert cause_of(1, error) is cause


def test_an_error_while_reading_the_data() -> None:
    frames = [
        '  File "/env/trainctl/train/trainer.py", line 80, in _step',
        '  File "/env/trainctl/train/data.py", line 60, in micro_batch',
        '  File "/env/numpy/core.py", line 3, in take',
    ]
    assert cause_of(1, "IndexError: out of bounds", frames) is Cause.data
    deeper = [frames[0], frames[1].replace("train/data", "data/streaming/reader")]
    assert cause_of(1, "IndexError: out of bounds", deeper) is Cause.data
    assert cause_of(1, "IndexError: out of bounds", frames[:1]) is Cause.code
    assert cause_of(1, "OSError: [Errno 28] No space left on device", frames) is Cause.disk_full


def test_signals_and_what_the_kernel_counts() -> None:
    kill, abort = -signal.SIGKILL, -signal.SIGABRT
    assert cause_of(kill, "MemoryError") is Cause.killed, "what it said before is not why"
    assert cause_of(kill, "", host_oom_kills=1) is Cause.host_memory
    assert cause_of(abort, "", ["terminate called", "what(): std::bad_alloc"]) is Cause.host_memory
    assert cause_of(abort, "", ["terminate called"]) is Cause.killed


def test_a_full_disk_of_a_rank_that_could_not_even_say_so() -> None:
    assert cause_of(1, "", disk=Cause.disk_full) is Cause.disk_full
    assert cause_of(1, "ValueError: no", disk=Cause.disk_full) is Cause.code
    assert cause_of(-9, "", disk=Cause.disk_full) is Cause.killed


def test_only_what_may_pass_is_tried_again() -> None:
    assert cause_of(4, "port 1 is taken") is Cause.reported
    final = {cause for cause in Cause if not cause.is_transient}
    assert final == {Cause.reported, Cause.disk_full, Cause.read_only}


def test_exit_codes() -> None:
    assert [exit_code(code) for code in (-9, -15, 1, 77)] == [137, 143, 6, 6]
    assert [exit_code(code, Cause.reported) for code in (2, 3, 4, 5, 6)] == [2, 3, 4, 5, 6]
    assert exit_code(1, Cause.disk_full) == 4


def test_the_cause_is_part_of_the_sentence(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("Traceback (most recent call last):\n  File x\nMemoryError\n")
    fields = describe_exit(1, log)
    assert fields["message"] == "ended with exit code 1 (out of memory on the host): MemoryError"
    assert fields["cause"] == "host_memory" and "offload" in fields["hint"]
    killed = describe_exit(-9, log, host_oom_kills=2)
    assert killed["message"] == "was killed by SIGKILL (out of memory on the host)"


@pytest.mark.parametrize(
    ("groups", "file", "text"),
    [
        ("0::/job/step\n", "job/step/memory.events", "low 0\noom 4\noom_kill 3\n"),
        ("4:memory:/job\n1:cpu:/\n", "memory/job/memory.oom_control", "under_oom 0\noom_kill 3\n"),
        ("4:cpu,memory:/host/path\n0::/\n", "memory/memory.oom_control", "oom_kill 3\n"),
        ("0::/\n", "../proc/vmstat", "pgfault 5\noom_kill 3\n"),
        ("", "../proc/vmstat", "oom_kill 3\n"),
        ("0::/\n", "nothing", ""),
    ],
)
def test_the_kernels_count_of_kills_for_memory(
    tmp_path: Path, groups: str, file: str, text: str
) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroups.mkdir()
    (proc / "self" / "cgroup").write_text(groups)
    (cgroups / file).parent.mkdir(parents=True, exist_ok=True)
    (cgroups / file).write_text(text)
    assert host_oom_kills(proc, cgroups) == (3 if text else 0)


def test_the_count_can_be_read_here() -> None:
    assert host_oom_kills() >= 0


def test_a_file_system_that_turns_read_only_is_the_machines_fault(tmp_path, monkeypatch) -> None:
    """The kernel does so after an error of the disk; the run's own records cannot tell then."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))

    assert disk_fault(tmp_path) is None
    monkeypatch.setattr(failures.tempfile, "TemporaryFile", refuse)
    assert disk_fault(tmp_path) is Cause.read_only
    assert cause_of(1, "", disk=Cause.read_only) is Cause.read_only
    assert exit_code(1, Cause.read_only) == 4 and not Cause.read_only.is_transient
    assert "trainctl resume" in Cause.read_only.hint
    run = new_run(tmp_path / "run")
    writer = SimpleNamespace(write=refuse)
    death = {"cause": "code", "message": "agent (process 7) ended with exit code 1", "hint": ""}
    agents = SimpleNamespace(describe_death=lambda: dict(death))
    records = SimpleNamespace(failure=None, poll=lambda: None)
    attempts._record_death(agents, records, writer, run)
    assert records.failure["cause"] == "read_only" and "agent" not in records.failure["message"]
    assert str(run.root) in records.failure["message"]
    monkeypatch.setattr(lock, "open_lock", refuse)
    with pytest.raises(TrainctlError, match="Read-only file system") as caught, hold_lock(run):
        pass
    assert "trainctl resume" in caught.value.hint and str(run.root) in caught.value.message
    summary = summarise_run(run)
    assert "read-only" in _why_lost(summary) and "agent" not in _why_lost(summary)
