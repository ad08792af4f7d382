"""Published tasks by EleutherAI's lm-eval (the extra `eval`), on an exported model.

Its `TaskManager`, `HFLM` and `simple_evaluate` do the work; this module holds the request, reports
progress and turns the results into rows. Code that comes with a model or a data set is not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainctl.config.suggest import did_you_mean, first_line, nearest_names
from trainctl.errors import MachineError, TrainctlError
from trainctl.runs.records import Progress

_PARTS = 50
"""Chunks of the requests of one kind; progress is reported after each chunk."""


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """Evaluation tasks requested on the command line, with their settings."""

    tasks: Sequence[str]
    """Names of tasks, groups or tags."""
    include: Path | None = None
    """Folder with the user's own task definitions, in YAML."""
    shots: int | None = None
    """Few-shot examples before each question; None takes each task's default."""
    limit: int | None = None
    """Most examples of a task."""
    batch_size: int = 1
    """Requests in a batch."""
    chat: bool = False
    """Whether questions are written by the tokenizer's chat template."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template besides the messages, by name."""


def manager_of(asked: TaskRequest) -> Any:
    """Return lm-eval's task manager, with the tasks of the folder `asked.include`.

    lm-eval's own tasks are 14,000 YAML files, read only if the folder does not define all tasks.

    Raises:
        TrainctlError: A task is unknown, or the folder cannot be read.
    """
    from lm_eval.tasks import TaskManager

    include = str(asked.include) if asked.include is not None else None
    try:
        if include is not None:
            own = TaskManager(include_path=include, include_defaults=False)
            if set(asked.tasks) <= set(own.all_tasks):
                return own
        manager = TaskManager(include_path=include)
    except Exception as error:  # whatever the YAML reader raises
        raise TrainctlError(f"--include-path {include}: {first_line(error)}") from None
    require_known(asked.tasks, manager.all_tasks)
    return manager


def require_known(names: Sequence[str], known: Sequence[str]) -> None:
    """Check that all tasks are known.

    Raises:
        TrainctlError: A task is unknown; the hint names the nearest ones.
    """
    for name in names:
        if name not in known:
            raise TrainctlError(
                f"lm-eval has no task {name!r}",
                hint=did_you_mean(nearest_names(name, known))
                or "`lm_eval ls tasks` lists all; --include-path DIR adds those of a folder",
            )


def evaluate_tasks(
    folder: Path, manager: Any, asked: TaskRequest, *, device: str, dtype: str, progress: Progress
) -> dict[str, Any]:
    """Evaluate an exported model on tasks.

    Args:
        folder: Transformers directory of the model, with its tokenizer.
        dtype: torch's name of the weights' format.
        progress: Called with the current activity, the requests done and their total.

    Returns:
        `results`: one row for each task, metric and filter of answers, with `task`, `metric`,
        `filter`, `value`, `stderr` (None where there is none), `samples`, `shots`; `lm_eval`: its
        version.

    Raises:
        TrainctlError: The data of a task is not available, or the model cannot do it (exit code 4).
    """
    from importlib.metadata import version

    from lm_eval.models.huggingface import HFLM

    class Watched(HFLM):  # type: ignore[misc]
        """`HFLM` that reports its progress."""

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
            return _in_chunks(super().loglikelihood, requests, "choosing", progress)

        def loglikelihood_rolling(
            self, requests: list[Any], disable_tqdm: bool = False
        ) -> list[Any]:
            return _in_chunks(super().loglikelihood_rolling, requests, "reading", progress)

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
            return _in_chunks(super().generate_until, requests, "answering", progress)

    try:
        model = Watched(
            pretrained=str(folder),
            device=device,
            dtype=dtype,
            batch_size=asked.batch_size,
            trust_remote_code=False,
            chat_template_args=dict(asked.template_arguments),
        )
        rows = rows_of_tasks(model, manager, asked)
    except Exception as error:  # raised by any data set, metric package or template
        raise MachineError(
            f"lm-eval cannot do {', '.join(asked.tasks)}: {type(error).__name__}: "
            f"{first_line(error)}",
            hint="data of a task comes from the hub once and is kept; code that comes with a model "
            "or data is not run",
        ) from error
    return {"results": rows, "lm_eval": version("lm_eval")}


def rows_of_tasks(
    model: Any, manager: Any, asked: TaskRequest, **settings: Any
) -> list[dict[str, Any]]:
    """Evaluate one of lm-eval's models on tasks; return the rows of its results.

    Args:
        settings: Further arguments of `simple_evaluate`.
    """
    import lm_eval

    found = lm_eval.simple_evaluate(
        model=model,
        tasks=list(asked.tasks),
        task_manager=manager,
        num_fewshot=asked.shots,
        limit=asked.limit,
        apply_chat_template=asked.chat,
        log_samples=False,
        **settings,
    )
    assert found is not None
    return rows_of(found)


def rows_of(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each task, metric and filter in lm-eval's results."""
    rows = []
    for task, values in found["results"].items():
        samples = found.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in values.items():
            metric, separator, kind = key.partition(",")
            if not separator or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{kind}")
            rows.append(
                {
                    "task": task,
                    "metric": metric,
                    "filter": kind,
                    "value": float(value),
                    "stderr": float(stderr) if isinstance(stderr, int | float) else None,
                    "samples": samples,
                    "shots": found.get("n-shot", {}).get(task),
                }
            )
    return rows


def _in_chunks(
    do: Callable[..., list[Any]], requests: Sequence[Any], what: str, progress: Progress
) -> list[Any]:
    """Call a method of the model on one chunk of requests after the other; return all answers."""
    size = max(1, -(-len(requests) // _PARTS))
    done: list[Any] = []
    progress(what, 0, len(requests))
    for start in range(0, len(requests), size):
        done += do(list(requests[start : start + size]), disable_tqdm=True)
        progress(what, len(done), len(requests))
    return done
