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
  recording/             summaries of tensors, in the replays of `trainctl prove` only
  proofs/                N.json: results of `trainctl prove`
  attempts/N/            one launch or resume, N from 1
    plan.json            frozen plan
    ds_config.json       DeepSpeed's configuration
    command.json         commands of each node
    job.json             the scheduler's job, if there is one
    logs/                rank-0.log ..., agent-0.log
    heartbeats/          rank-0 ...: last phase of each rank, and its time
    profile/             rank-0.trace.json.gz and rank-0.txt, with logging.profile_steps
    memory/              rank-0.pickle ..., with the callback memory_snapshot
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RUN_ID_VARIABLE = "TRAINCTL_RUN_ID"
"""Variable of every process of a run, by which its processes are found."""


@dataclass(frozen=True, slots=True)
class AttemptPaths:
    """Files of one attempt."""

    root: Path
    number: int

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def deepspeed(self) -> Path:
        return self.root / "ds_config.json"

    @property
    def accelerate(self) -> Path:
        """DeepSpeed's JSON without optimizer and scheduler, for a script's `Accelerator()`."""
        return self.root / "accelerate_config.json"

    @property
    def command(self) -> Path:
        return self.root / "command.json"

    @property
    def job(self) -> Path:
        return self.root / "job.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def agent_log(self, node: int) -> Path:
        return self.logs / f"agent-{node}.log"

    @property
    def launcher_log(self) -> Path:
        """Output of a launcher that has no terminal."""
        return self.logs / "launcher.log"

    def heartbeat(self, rank: int) -> Path:
        return self.root / "heartbeats" / f"rank-{rank}"

    @property
    def preparation(self) -> Path:
        """Heartbeat of the first node's agent while it prepares, before there are ranks."""
        return self.root / "heartbeats" / "preparation"

    @property
    def store(self) -> Path:
        """File store of a single node's ranks; removed when they have ended."""
        return self.root / "store"

    @property
    def profile(self) -> Path:
        return self.root / "profile"


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

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def record(self) -> Path:
        return self.root / "run.json"

    @property
    def patch(self) -> Path:
        return self.root / "source.patch"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def corpus(self) -> Path:
        return self.root / "corpus.json"

    @property
    def base(self) -> Path:
        """Facts on the files of its frozen weights (`trainctl.train.models.frozen_base`)."""
        return self.root / "base.json"

    @property
    def users_corpus(self) -> Path:
        return self.root / "corpus"

    @property
    def reference(self) -> Path:
        return self.root / "reference.npz"

    @property
    def teacher(self) -> Path:
        return self.root / "teacher.json"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def requests(self) -> Path:
        return self.root / "requests"

    @property
    def recording(self) -> Path:
        """Folder of a replay: `settings.json` makes its ranks record, each in `rank-N.npz`."""
        return self.root / "recording"

    @property
    def proofs(self) -> Path:
        return self.root / "proofs"

    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    def companion(self, name: str) -> CompanionPaths:
        return CompanionPaths(self.root / "loggers", name)

    def attempt(self, number: int) -> AttemptPaths:
        return AttemptPaths(self.attempts / str(number), number)
