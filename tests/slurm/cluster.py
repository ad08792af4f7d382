"""A real Slurm on this machine: munged, slurmctld, two slurmd, in one folder on free ports.

Nothing of the machine's own Slurm or munge is touched: sockets, keys, state and logs are in the
folder, and every daemon is ended with the cluster.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from ports import reserved_port

from trainctl.runs.processes import PARENT_VARIABLE, pdeathsig_command

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
NODES = ("tca", "tcb")

CONFIGURATION = """\
ClusterName=trainctl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdDebug=verbose
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=60
InactiveLimit=0
MinJobAge=300
PropagateResourceLimits=NONE
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs=4 State=UNKNOWN
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def missing() -> list[str]:
    """Return what this machine lacks to run Slurm."""
    found = [tool for tool in TOOLS if not shutil.which(tool, path=_path())]
    return [*found, *(["root"] if os.geteuid() else [])]


class Cluster:
    """Slurm cluster on this machine, started by `with`.

    `folder` needs a short path, because it holds sockets.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which Slurm's commands and trainctl find this cluster and no other."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TRAINCTL_"))}
        return {**kept, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _path()}

    def run(self, *command: str, code: int | None = 0) -> str:
        """Run a Slurm command and return its output."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60
        )
        assert code is None or done.returncode == code, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def state(self, job: str) -> str:
        """State of a job, such as `RUNNING`, with its exit code, such as `FAILED 6:0`."""
        shown = self.run("scontrol", "show", "job", "-o", job)
        found = re.search(r"JobState=(\S+).* ExitCode=(\S+)", shown)
        assert found, shown
        return f"{found[1]} {found[2]}"

    def wait_for(self, job: str, *states: str, seconds: float = 120) -> str:
        """Wait until the job is in one of these states, and return its state."""
        deadline = time.monotonic() + seconds
        while True:
            state = self.state(job)
            if state.split()[0] in states:
                return state
            if time.monotonic() > deadline:
                queue = self.run("squeue")
                raise AssertionError(f"job {job} is {state} after {seconds:.0f} s\n{queue}")
            time.sleep(0.2)

    def __enter__(self) -> Cluster:
        self._stack.callback(self._end)
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        folder = self.folder
        # slurmctld and munged refuse folders that others may write to.
        for path in (folder, folder / "state"):
            path.mkdir(mode=0o755, exist_ok=True)
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        ports = [self._stack.enter_context(reserved_port()) for _ in range(3)]
        text = CONFIGURATION.format(
            folder=folder,
            host=socket.gethostname().split(".")[0],
            controller_port=ports[0],
            nodes=NODES,
            ports=ports[1:],
        )
        (folder / "slurm.conf").write_text(text)
        self._daemon(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={folder}/munge.key",
            f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munge.pid",
            f"--log-file={folder}/munge.log",
            f"--seed-file={folder}/munge.seed",
        )
        _wait(lambda: (folder / "munge.socket").exists())
        self._daemon("slurmctld", "-D", "-c")
        for node in NODES:
            (folder / f"spool-{node}").mkdir(mode=0o755)
            self._daemon("slurmd", "-D", "-N", node)
        ready = f"{len(NODES)} idle"
        _wait(lambda: ready in self.run("sinfo", "-h", "-p", "low", "-o", "%D %t", code=None))

    def _daemon(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}-{len(self._daemons)}.out").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    # Ended by the kernel too, should this process be killed.
                    [*pdeathsig_command(signal.SIGTERM), name, *arguments],
                    env={**self.environment, PARENT_VARIABLE: str(os.getpid())},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _end(self) -> None:
        with suppress(Exception):
            self.run("scancel", "--user", "root", "--full", code=None)
            self.run("scancel", "--user", "root", "--signal=KILL", "--full", code=None)
            _wait(lambda: not self.run("squeue", "-h", code=None).strip(), seconds=20)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=5)
            with suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()
        self._end_steps()

    def _end_steps(self) -> None:
        """Step daemons detach from slurmd; those of this cluster have its configuration."""
        wanted = os.fsencode(f"SLURM_CONF={self.folder}/slurm.conf")
        for process in Path("/proc").iterdir():
            with suppress(OSError):
                is_ours = process.name.isdigit() and int(process.name) != os.getpid()
                if is_ours and wanted in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)


def _wait(condition: object, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "the cluster does not come up"
        time.sleep(0.1)


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"
