"""Names inside a run directory: the contract between launcher, agent and ranks.

RUN/
  config.yaml            composed configuration; written once, never changed
  run.json               id, creation time, command line, versions, git revision, environment
  source.patch           uncommitted changes of the user's folder, if it is a git checkout
  lock                   held (flock) by the launch that runs here
  status.json            state of the newest attempt
  events.jsonl           events of every attempt
  events.lock            held (flock) by the process that appends a record
  steps/                 attempt-N.csv: the steps of an attempt, a row each
  corpus/                tokenized documents of `data.factory`; others are in the cache
  reference.npz          reference log-probabilities of preference pairs, from the initial weights
  teacher.json           teacher of a distillation, and the folder of its log-probabilities
  rollouts/              step-N-ID/: sampled answers of the steps from N on (objective=grpo)
  served/                weights on their way to a rollout server; removed when it has read them
  checkpoints/           committed checkpoints `step-00000040/`, and the pointer `latest`
  loggers/               NAME.json: progress of each logger of `logging.to`, of `alerts`, and of
                         `mirror` (`checkpoint.mirror`); NAME.log: its output
  NAME/                  files of the logger of that name
  callbacks/             NAME/: files of the callback of that name, if it has any
  requests/              requests to a running launch, for its next step
  recording/             what the ranks of a replay are asked for, and what they found
                         (`trainctl prove`, `trial`, `data suspects`)
  proofs/                N.json: results of `trainctl prove`, `trial` and `data suspects`
  attempts/N/            one launch or resume, N from 1
    plan.json            frozen plan
    ds_config.json       DeepSpeed's configuration
    command.json         commands of each node
    job.json             the scheduler's job, if there is one
    logs/                rank-0.log ..., agent-0.log
    heartbeats/          rank-0 ...: last phase of each rank, and its time
    flight_recorder/     rank-0.json ...: last collectives of each rank, after a hang
    profile/             rank-0.trace.json.gz and rank-0.txt, with logging.profile_steps
    memory/              rank-0.pickle ..., with the callback memory_snapshot
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RUN_ID_VARIABLE = "TRAINCTL_RUN_ID"
"""Variable of every process of a run, by which its processes are found."""


class _Below:
    """Descriptor of a path below its owner's `root`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, owner: AttemptPaths | RunPaths, kind: object = None) -> Path:
        return owner.root / self._path


@dataclass(frozen=True, slots=True)
class AttemptPaths:
    """Files of one attempt."""

    root: Path
    number: int

    plan = _Below("plan.json")
    deepspeed = _Below("ds_config.json")
    accelerate = _Below("accelerate_config.json")
    """DeepSpeed's JSON without optimizer and scheduler, for a script's `Accelerator()`."""
    command = _Below("command.json")
    job = _Below("job.json")
    logs = _Below("logs")
    launcher_log = _Below("logs/launcher.log")
    """Output of a launcher that has no terminal."""
    flight_request = _Below("flight_recorder/requested")
    """File by which the agent of one node asks all others for their ranks' records."""
    preparation = _Below("heartbeats/preparation")
    """Heartbeat of the first node's agent while it prepares, before there are ranks."""
    store = _Below("store")
    """File store of a single node's ranks; removed when they have ended."""
    profile = _Below("profile")

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def agent_log(self, node: int) -> Path:
        return self.logs / f"agent-{node}.log"

    def heartbeat(self, rank: int) -> Path:
        return self.root / "heartbeats" / f"rank-{rank}"

    def flight_record(self, rank: int) -> Path:
        """Last collectives of a rank and its stack, written when ranks hang or fail."""
        return self.root / "flight_recorder" / f"rank-{rank}.json"


@dataclass(frozen=True, slots=True)
class CompanionPaths:
    """Files of a process beside the run, which sends metrics or checkpoints."""

    folder: Path
    name: str

    @property
    def cursor(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def lock(self) -> Path:
        """Lock file, held (flock) by the process that sends."""
        return self.folder / f"{self.name}.lock"

    @property
    def log(self) -> Path:
        """Output of the process that sends."""
        return self.folder / f"{self.name}.log"


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Files of one run."""

    root: Path

    config = _Below("config.yaml")
    record = _Below("run.json")
    patch = _Below("source.patch")
    lock = _Below("lock")
    status = _Below("status.json")
    events = _Below("events.jsonl")
    corpus = _Below("corpus.json")
    base = _Below("base.json")
    """Facts on the files of its frozen weights (`trainctl.train.models.frozen_base`)."""
    users_corpus = _Below("corpus")
    reference = _Below("reference.npz")
    teacher = _Below("teacher.json")
    callbacks = _Below("callbacks")
    rollouts = _Below("rollouts")
    checkpoints = _Below("checkpoints")
    requests = _Below("requests")
    recording = _Below("recording")
    """Folder of a replay: files of `trainctl.runs.replays`, and what the ranks found."""
    proofs = _Below("proofs")
    attempts = _Below("attempts")

    def companion(self, name: str) -> CompanionPaths:
        return CompanionPaths(self.root / "loggers", name)

    def attempt(self, number: int) -> AttemptPaths:
        return AttemptPaths(self.attempts / str(number), number)
