"""Processes of a launch: tied programs, launchers in the background, ssh, companions.

Companions send a run's metrics to its loggers and its checkpoints to `checkpoint.mirror`. They read
the run's files, and the run never waits for them. One that dies is restarted. One that has not sent
everything a while after the run's end is killed; `trainctl runs sync` sends the rest.
"""

from __future__ import annotations

import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Self

from trainctl.config.hosts import Host
from trainctl.config.schema import RunConfig
from trainctl.errors import StoppedBySignal, TrainctlError
from trainctl.monitor.loggers.delivery import ALERTS, command, read_cursor
from trainctl.options.launcher.ssh import SshConfig
from trainctl.runs.attempts import config_of
from trainctl.runs.companion import run_companion
from trainctl.runs.completion import record_completion
from trainctl.runs.files import ensure_folder, open_as_its_folder
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.lock import name_holder
from trainctl.runs.mirror_state import MIRROR, read_mirror_state
from trainctl.runs.processes import PARENT_VARIABLE, RunTag, pdeathsig_command
from trainctl.runs.records import Event, EventWriter, OnEvent

Process = subprocess.Popen[bytes]

CONNECT_SECONDS = 10
_OPEN_FILES = 65_536


@contextmanager
def signals_raise() -> Iterator[None]:
    """Turn the first SIGTERM or SIGHUP into `StoppedBySignal`, so that the command cleans up.

    Python handles signals in the main thread: in another one nothing changes.
    """

    def end(number: int, _: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise StoppedBySignal(number)

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        # They are ignored under nohup; None is a handler of a library's, which stays.
        is_ours = signal.getsignal(number) not in (signal.SIG_IGN, None)
        if current_thread() is main_thread() and is_ours:
            before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start_with_pdeathsig(
    argv: Sequence[str],
    *,
    tag: RunTag,
    environment: Mapping[str, str] | None = None,
    log: Path,
    lock: int | None = None,
    has_input: bool = False,
    death_signal: signal.Signals = signal.SIGKILL,
) -> Process:
    """Start a program that is not ours (ssh, srun, mpirun); the kernel ends it with this process.

    Args:
        environment: Variables added to this process's.
        lock: Descriptor of the run's lock, if the program is to inherit it.
        has_input: Whether this process writes its stdin, unbuffered; else its stdin is empty.
        death_signal: Signal that it gets when this process ends.
    """
    with open(log, "ab", opener=open_as_its_folder) as stream:
        return subprocess.Popen(
            [*pdeathsig_command(death_signal), *argv],
            env=tagged_environment(tag, environment or {}),
            stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            bufsize=0,
            start_new_session=True,
            pass_fds=() if lock is None else (lock,),
        )


def tagged_environment(tag: RunTag, environment: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with more variables, for a process that carries the tag."""
    return {**os.environ, **environment, **tag.environment(), PARENT_VARIABLE: str(os.getpid())}


def start_in_background(
    run: RunPaths,
    attempt: AttemptPaths,
    lock: int,
    *,
    dies_with_parent: bool = False,
    python: str = sys.executable,
) -> Process:
    """Start the attempt's launcher in a session of its own; its output goes to `launcher.log`.

    It inherits the run's lock, so no other process can take the run when this process ends.

    Args:
        dies_with_parent: Whether the launcher gets SIGTERM when this process ends.
        python: Interpreter of the launcher and all that it starts.
    """
    environment = {k: v for k, v in os.environ.items() if k != PARENT_VARIABLE}
    if dies_with_parent:
        environment[PARENT_VARIABLE] = str(os.getpid())
    command = [python, "-P", "-m", "trainctl.launchers", str(run.root)]
    command += ["--attempt", str(attempt.number), "--lock", str(lock)]
    with open(attempt.launcher_log, "ab", opener=open_as_its_folder) as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(lock,),
        )
    name_holder(lock, process.pid)
    return process


def ssh_command(host: Host, launcher: SshConfig, module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line that runs a module of trainctl on a host.

    It never prompts, uses no connection that another process made, and notices within
    `launcher.node_timeout_seconds` that the host is gone.
    """
    options = {
        "BatchMode": "yes",
        "ClearAllForwardings": "yes",
        "ConnectTimeout": CONNECT_SECONDS,
        "ControlMaster": "no",
        "ControlPath": "none",
        "ServerAliveCountMax": 3,
        "ServerAliveInterval": max(1, int(launcher.node_timeout_seconds / 3)),
    }
    return (
        "ssh",
        *(("-F", launcher.ssh_config) if launcher.ssh_config is not None else ()),
        *(word for name, value in options.items() for word in ("-o", f"{name}={value}")),
        "-T",
        "--",
        host.name,
        # -P: import nothing from the home directory there.
        shell_line((launcher.python or sys.executable, "-P", "-m", module, *arguments)),
    )


def allow_many_files() -> None:
    """Raise this process's limit of open files, as far as it may.

    Each host takes up to three files, and a usual limit of 1024 ends at 340 hosts.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if most == resource.RLIM_INFINITY else min(_OPEN_FILES, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def shell_line(argv: Sequence[str]) -> str:
    """Return a line that makes any shell exec the command, whatever characters it has."""
    return f"exec {shlex.join(argv)}"


_GRACE_SECONDS = 10.0
"""Time for sending the rest when the run has ended."""
_STOPPING_GRACE_SECONDS = 2.0
"""Time for sending the rest where a signal ended the run at once."""
_CHECK_SECONDS = 5.0
_RESTARTS = 5
_POLL_SECONDS = 0.05


def companion_names(config: RunConfig, *, with_alerts: bool = True) -> list[str]:
    """Return the names of the companions: the loggers, one for alerts, one for the mirror."""
    alerts = [ALERTS] if with_alerts and config.logging.alerts.are_wanted else []
    is_mirrored = config.checkpoint.mirror is not None and config.trains_itself
    return [*config.logging.to, *alerts, *([MIRROR] if is_mirrored else [])]


def send_rest(run: RunPaths, name: str, config: RunConfig, *, again: bool = False) -> int:
    """Have a companion send what is left, and return its exit code.

    Args:
        again: Whether a logger gets everything from the beginning.

    Raises:
        TrainctlError: The run directory cannot be written (exit code 4).
    """
    options = ("--again",) if again and name != MIRROR else ()
    return run_companion(run, name, _command(run, name, config, *options))


def settle_run(run: RunPaths) -> bool:
    """Write down that a run has finished, if it died when its work was done, and have its
    companions send the last records; return whether it was so.
    """
    if not record_completion(run):
        return False
    with suppress(TrainctlError):  # the run is finished all the same
        config = config_of(run)
        for name in companion_names(config):
            send_rest(run, name, config)
    return True


def companion_problem(run: RunPaths, name: str) -> str:
    """Return why a companion could not send everything; empty if nothing is wrong."""
    if name == MIRROR:
        return read_mirror_state(run).problem
    try:
        return read_cursor(run.companion(name).cursor).problem
    except TrainctlError as error:
        return error.message


def _command(run: RunPaths, name: str, config: RunConfig, *options: str) -> list[str]:
    if name == MIRROR:
        return [sys.executable, "-P", "-m", "trainctl.mirror", str(run.root), name, *options]
    return command(run, name, *options, config=config)


class Companions:
    """Context in which the companions run. No method raises, or waits while the run goes on.

    Args:
        tag: Tag of their processes, without an attempt: they outlive attempts.
        on_event: Called with each record about a problem of theirs.
    """

    def __init__(self, run: RunPaths, config: RunConfig, tag: RunTag, on_event: OnEvent) -> None:
        self._companions = [_Companion(run, name, config, tag) for name in companion_names(config)]
        self._run, self._on_event = run, on_event
        self._checked_at = time.monotonic()
        self._attempt = 1

    def on_event(self, event: Event) -> None:
        """Pass a record of the run on, and check the processes now and then."""
        self._on_event(event)
        self._attempt = event["attempt"]
        if self._companions and time.monotonic() - self._checked_at > _CHECK_SECONDS:
            self._checked_at = time.monotonic()
            for companion in self._companions:
                companion.keep_alive()
                self._record_problem(companion)

    def __enter__(self) -> Self:
        for companion in self._companions:
            companion.start()
        return self

    def __exit__(self, *_: object) -> None:
        for companion in self._companions:
            companion.kill()

    def finish(self, is_stopping: Callable[[], bool]) -> None:
        """Have the processes send the rest, and record what they could not send.

        Args:
            is_stopping: Returns True if the launch is to end now; called again and again.
        """
        for companion in self._companions:
            companion.keep_alive()
            companion.ask_to_end()
        started = time.monotonic()
        while any(companion.is_alive for companion in self._companions):
            grace = _STOPPING_GRACE_SECONDS if is_stopping() else _GRACE_SECONDS
            if time.monotonic() - started > grace:
                break
            time.sleep(_POLL_SECONDS)
        for companion in self._companions:
            companion.kill()
            event = self._record_problem(companion)
            if event is not None:  # the launcher no longer reads the records itself
                self._on_event(event)

    def _record_problem(self, companion: _Companion) -> Event | None:
        """Record a change of a companion's problem, its end included; return the record, if any."""
        problem = companion.problem()
        if problem == companion.reported:
            return None
        companion.reported = problem
        with suppress(OSError), EventWriter(self._run.events, self._attempt) as events:
            if companion.name == MIRROR:
                return events.write("mirror", problem=problem)
            return events.write("logger", name=companion.name, problem=problem)
        return None


class _Companion:
    def __init__(self, run: RunPaths, name: str, config: RunConfig, tag: RunTag) -> None:
        self.name = name
        self.reported = ""
        self._run, self._config, self._tag = run, config, tag
        self._paths = run.companion(name)
        self._process: Process | None = None
        self._failure = ""
        self._restarts = 0

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process. A failure to start it becomes its problem."""
        argv = _command(self._run, self.name, self._config, "--follow")
        try:
            ensure_folder(self._paths.folder)
            self._process = start_with_pdeathsig(
                argv, tag=self._tag, log=self._paths.log, has_input=True
            )
            self._failure = ""
        except OSError as error:
            self._failure = f"it cannot be started: {error.strerror}"

    def keep_alive(self) -> None:
        """Restart the process if it has died, at most `_RESTARTS` times."""
        if self.is_alive:
            return
        if self._restarts < _RESTARTS:
            self._restarts += 1
            self.start()
        else:
            self._failure = f"its process died {_RESTARTS + 1} times, see {self._paths.log}"

    def ask_to_end(self) -> None:
        """Have the process send the rest and end."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """End the process if it is still running, and note that as a failure."""
        if self._process is None:
            return
        if self.is_alive:
            self._process.kill()
            self._failure = "it had not sent everything when it was ended"
        code = self._process.wait()
        if code and not self._failure:
            self._failure = f"its process ended with {code}, see {self._paths.log}"

    def problem(self) -> str:
        """Return why not everything was sent; empty if nothing is wrong."""
        return companion_problem(self._run, self.name) or self._failure
