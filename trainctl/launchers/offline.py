"""Work on the weights of a run outside training: evaluation, samples, import, added tokens.

Each function runs a task of `trainctl.train.offline` or `trainctl.migration` in a process of its
own, because the command line loads no torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainctl.config.codec import to_plain
from trainctl.config.compose import ComposedConfig
from trainctl.config.extras import install_command
from trainctl.errors import ExitCode, TrainctlError
from trainctl.launchers.planning import compose_target, plan_config
from trainctl.runs.attempts import effective_attempt
from trainctl.runs.checkpoint_selection import Progress, Warn, choose_checkpoint
from trainctl.runs.directory import is_run
from trainctl.runs.files import write_json
from trainctl.runs.layout import RunPaths
from trainctl.runs.processes import PARENT_VARIABLE
from trainctl.runs.records import EventWriter

MIGRATION = "trainctl.migration"
"""Module with the tasks on checkpoints of other trainers."""


def _ignore_progress(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsChoice:
    """Weights of a run to work on."""

    run: RunPaths
    step: int | None = None
    """Step of the checkpoint; None takes the newest that is intact."""
    best: bool = False
    """Whether to take the checkpoint with the lowest `checkpoint.best_of` metric."""
    weights: str = "raw"
    """`raw`: the trained weights; `ema`: their moving average."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: an accelerator with room for the model, else the CPU."""
    progress: Progress = field(default=_ignore_progress, repr=False)
    warn: Warn = field(default=_ignore_progress, repr=False)
    """Called for each damaged checkpoint that is passed over."""

    def checkpoint(self) -> Path:
        """Return the checkpoint, with every byte verified.

        Raises:
            TrainctlError: There is no such checkpoint that is intact (exit code 5).
        """
        return choose_checkpoint(self.run, self.progress, self.warn, step=self.step, best=self.best)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """Evaluation tasks of lm-eval, with their settings."""

    names: tuple[str, ...]
    include: Path | None = None
    """Folder of the user's own tasks in lm-eval's YAML."""
    shots: int | None = None
    """Examples before each question; None takes the task's own number."""
    samples: int | None = None
    """Examples of each task; None takes all."""
    batch_size: int | None = None
    """Requests at a time; None takes the run's micro-batch."""
    chat: bool = False
    """Whether questions go through the tokenizer's chat template."""
    keep: Path | None = None
    """New folder for the export that the tasks run on; None removes it afterwards."""


def evaluate(choice: WeightsChoice, *, samples: int | None = None) -> dict[str, Any]:
    """Return the held-out loss of a checkpoint, in nats per token, with its parts.

    `samples` is the number of held-out samples; None takes the run's own.
    """
    options = [] if samples is None else ["--samples", str(samples)]
    return run_task("evaluate", choice, options)


def evaluate_tasks(choice: WeightsChoice, tasks: TaskSettings) -> dict[str, Any]:
    """Evaluate tasks, append the results to the run's records, and return them.

    Raises:
        TrainctlError: lm-eval is not installed (exit code 4), the folder of tasks does not exist,
            the folder to keep is not empty, or the evaluation failed.
    """
    require_harness()
    if tasks.include is not None and not tasks.include.is_dir():
        raise TrainctlError(f"--include-path {tasks.include} is no folder")
    if tasks.keep is not None:
        require_new(tasks.keep)
    options = [f"--name={name}" for name in tasks.names]
    for option, value in (
        ("include", tasks.include.resolve() if tasks.include else None),
        ("keep", tasks.keep.resolve() if tasks.keep else None),
        ("shots", tasks.shots),
        ("limit", tasks.samples),
        ("batch-size", tasks.batch_size),
    ):
        if value is not None:
            options.append(f"--{option}={value}")
    options += ["--chat"] if tasks.chat else []
    found = run_task("tasks", choice, options, chat=tasks.chat)
    record = {name: value for name, value in found.items() if name != "run"}
    try:
        with EventWriter(choice.run.events, effective_attempt(choice.run).number) as writer:
            writer.write("tasks", **record)
    except OSError as error:  # another user's run, which is read-only
        choice.warn(f"not added to the run's records: {error.strerror}")
    return found


def require_harness() -> None:
    """Refuse to begin without lm-eval.

    Raises:
        TrainctlError: lm-eval is not installed (exit code 4).
    """
    if find_spec("lm_eval") is None:
        raise TrainctlError(
            "--tasks needs a package that is missing (lm_eval)",
            hint=install_command("lm_eval"),
            exit_code=ExitCode.environment,
        )


def sample(
    choice: WeightsChoice,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    seed: int | None = None,
    chat: bool | None = None,
    system: str | None = None,
) -> dict[str, Any]:
    """Generate a continuation of a prompt, or with `chat` an answer to it.

    Args:
        tokens: Most tokens to generate.
        seed: Seed of the draws; None takes `training.seed`.
        chat: Whether the prompt is a user's message; None means so for runs of `data=chat` alone.
        system: System message before the prompt.
    """
    # The form with `=`: the prompt may start with a dash.
    options = [f"--prompt={prompt}", f"--tokens={tokens}", f"--temperature={temperature}"]
    if seed is not None:
        options.append(f"--seed={seed}")
    if chat is not None:
        options.append("--chat" if chat else "--no-chat")
    if system is not None:
        options.append(f"--system={system}")
    return run_task("sample", choice, options, prompt=prompt, temperature=temperature)


def score(
    choice: WeightsChoice, prompt: str, answers: Sequence[str] = (), *, chat: bool = False
) -> dict[str, Any]:
    """Return the scores of each answer to a prompt, or of the prompt as a text: `scored`.

    Args:
        chat: Whether prompt and answers are messages of a conversation.
    """
    options = [f"--prompt={prompt}", *(f"--answer={answer}" for answer in answers)]
    return run_task("score", choice, [*options, *(["--chat"] if chat else [])])


def add_tokens(
    directory: Path, out: Path, tokens: Sequence[str], *, multiple_of: int, progress: Progress
) -> dict[str, Any]:
    """Write a transformers directory again with more special tokens.

    Args:
        out: A new or empty folder.
        multiple_of: The number of rows of the embedding is rounded up to a multiple of it.

    Raises:
        TrainctlError: The folder is not empty, or the directory cannot be read.
    """
    require_new(out)
    arguments: list[str | Path] = [directory.absolute(), out.absolute(), json.dumps(list(tokens))]
    return run_offline("add-tokens", [*arguments, "--multiple-of", str(multiple_of)], progress)


def import_checkpoint(
    directory: Path,
    run_dir: Path,
    composed: ComposedConfig | None,
    *,
    format: str | None = None,
    argv: Sequence[str] = (),
    progress: Progress,
) -> dict[str, Any]:
    """Make a run whose first checkpoint has the state of another trainer's checkpoint.

    Args:
        directory: Directory of that checkpoint.
        run_dir: Directory of the run to make, or of a run without checkpoints.
        composed: The run's configuration; None takes that of the run in `run_dir`.
        format: Format of the checkpoint; None detects it.
        argv: Command line for the run's record.

    Raises:
        TrainctlError: The configuration is wrong; or the checkpoint is damaged, or of another model
            or optimizer.
    """
    if composed is None:
        composed = compose_target(str(run_dir), (), None)
    elif is_run(run_dir):
        raise TrainctlError(
            f"{run_dir} is a run, which has its configuration", hint="leave the overrides out"
        )
    planned = plan_config(composed, with_files=True, tokenize=True)
    if planned.unforceable_errors:
        raise TrainctlError.from_findings(planned.findings)
    with tempfile.TemporaryDirectory(prefix="trainctl-") as temporary:
        file = Path(temporary) / "plan.json"
        write_json(file, to_plain(planned.plan))
        paths = [directory.absolute(), run_dir.absolute(), file]
        options = [] if format is None else ["--from", format]
        return run_offline(
            "import", [*paths, json.dumps(list(argv)), *options], progress, MIGRATION
        )


def require_new(out: Path, *, is_file: bool = False) -> None:
    """Refuse an output path that exists, unless it is an empty folder; called before the work.

    Args:
        is_file: Whether the output is a file, so that no folder may be there.

    Raises:
        TrainctlError: The path is a file, or a folder that is not empty.
    """
    if is_file and out.exists():
        raise TrainctlError(f"{out} exists", hint="name another file, or remove it")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TrainctlError(
            f"{out} exists and is not an empty folder", hint="name another, or remove it"
        )


def run_task(
    task: str,
    choice: WeightsChoice,
    options: Sequence[str],
    *,
    positional: Sequence[Path] = (),
    has_device: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """Run a task on the chosen weights; return its result after run, checkpoint and settings."""
    checkpoint = choice.checkpoint()
    arguments: list[str | Path] = [choice.run.root, checkpoint, *positional]
    arguments += ["--weights", choice.weights]
    arguments += ["--device", choice.device] if has_device else []
    result = run_offline(task, [*arguments, *options], choice.progress)
    where = {"run": str(choice.run.root), "checkpoint": checkpoint.name, "weights": choice.weights}
    return {**where, **settings, **result}


def run_offline(
    task: str,
    arguments: Sequence[str | Path],
    progress: Progress,
    module: str = "trainctl.train.offline",
) -> dict[str, Any]:
    """Run a task of a module in a process of its own and return its result.

    Raises:
        TrainctlError: The task failed with a message, or the process was killed (exit code 4).
        RuntimeError: The process ended without an answer, by a bug; its output is a note.
    """
    command = [sys.executable, "-P", "-m", module, task, *map(str, arguments)]
    result: dict[str, Any] | None = None
    with (
        tempfile.TemporaryFile() as talk,
        # In a session of its own: Ctrl-C reaches only this process, which then ends that one.
        subprocess.Popen(
            command,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=talk,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                answer = json.loads(line)
                if "progress" in answer:
                    progress(*answer["progress"])
                elif "error" in answer:
                    raise _error_from_json(answer["error"])
                else:
                    result = answer["result"]
            code = process.wait()
        except BaseException:
            process.terminate()
            raise
        if result is None:
            talk.seek(0)
            raise _process_failure(task, code, talk.read().decode(errors="replace"))
    return result


def _error_from_json(problem: dict[str, Any]) -> TrainctlError:
    code = ExitCode(problem["exit_code"])
    return TrainctlError(problem["message"], hint=problem["hint"], exit_code=code)


def _process_failure(task: str, code: int, talk: str) -> Exception:
    """Return the error of a process that ended without a result: it was killed, or has a bug."""
    if code < 0:
        name = signal.Signals(-code).name
        hint = "the memory of this machine may not suffice" if name == "SIGKILL" else ""
        return TrainctlError(
            f"the process that was to {task} was ended by {name}",
            hint=hint,
            exit_code=ExitCode.environment,
        )
    error = RuntimeError(f"the process that was to {task} failed by an error of its own")
    error.add_note(talk.rstrip())
    return error
