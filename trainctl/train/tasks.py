"""Published tasks on an exported model, by lm-eval, EleutherAI's harness (the extra `tasks`).

Its `TaskManager`, `HFLM` and `simple_evaluate` do all of it; here are what is asked for, how far it
has come, and the results as rows. No code of a model or of a data set is let run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainctl.config.suggest import did_you_mean, first_line, nearest
from trainctl.errors import ExitCode, TrainctlError

Progress = Callable[[str, int, int], None]

_PARTS = 50
"""In how many pieces the requests of one kind are given to the model: progress is by pieces."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Which tasks, and how."""

    tasks: Sequence[str]
    """Names of tasks, groups or tags."""
    include: Path | None = None
    """A folder with definitions of tasks of the user's own, in YAML."""
    shots: int | None = None
    """Examples before each question; None is each task's own number."""
    limit: int | None = None
    """Examples of each task, at most."""
    batch_size: int = 1
    """Requests that the model sees at a time."""
    chat: bool = False
    """Whether questions are written by the tokenizer's chat template."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """What that is given beside the messages, by name."""


def manager_of(asked: Asked) -> Any:
    """Return the harness's own list of tasks, with those of a folder.

    Its own are 14,000 files of YAML: they are read only where the folder does not have all of it.

    Raises:
        TrainctlError: A task is not in it; or the folder cannot be read.
    """
    from lm_eval.tasks import TaskManager

    include = str(asked.include) if asked.include is not None else None
    try:
        if include is not None:
            own = TaskManager(include_path=include, include_defaults=False)
            if set(asked.tasks) <= set(own.all_tasks):
                return own
        manager = TaskManager(include_path=include)
    except Exception as error:  # of a YAML file: whatever its reader raises
        raise TrainctlError(f"--include-path {include}: {first_line(error)}") from None
    require_known(asked.tasks, manager.all_tasks)
    return manager


def require_known(names: Sequence[str], known: Sequence[str]) -> None:
    """Refuse names of tasks that there are none of.

    Raises:
        TrainctlError: With the nearest ones.
    """
    for name in names:
        if name not in known:
            raise TrainctlError(
                f"lm-eval has no task {name!r}",
                hint=did_you_mean(nearest(name, known))
                or "`lm_eval ls tasks` lists all; --include-path DIR adds those of a folder",
            )


def evaluate_tasks(
    folder: Path, manager: Any, asked: Asked, *, device: str, dtype: str, progress: Progress
) -> dict[str, Any]:
    """Do tasks with a transformers directory.

    Args:
        folder: It, with its tokenizer.
        dtype: torch's name of the weights' format.
        progress: Called with what is done, how much of it, and how much there is.

    Returns:
        `results`: for each task, metric and filter of answers a mapping with `task`, `metric`,
        `filter`, `value`, `stderr` (None where there is none), `samples`, `shots`; `lm_eval`: its
        version.

    Raises:
        TrainctlError: The data of a task cannot be had, or the model cannot do it (exit code 4).
    """
    from importlib.metadata import version

    import lm_eval
    from lm_eval.models.huggingface import HFLM

    class Watched(HFLM):  # type: ignore[misc]
        """Says how far it has come."""

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
            return _in_parts(super().loglikelihood, requests, "choosing", progress)

        def loglikelihood_rolling(
            self, requests: list[Any], disable_tqdm: bool = False
        ) -> list[Any]:
            return _in_parts(super().loglikelihood_rolling, requests, "reading", progress)

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
            return _in_parts(super().generate_until, requests, "answering", progress)

    try:
        model = Watched(
            pretrained=str(folder),
            device=device,
            dtype=dtype,
            batch_size=asked.batch_size,
            trust_remote_code=False,
            chat_template_args=dict(asked.template_arguments),
        )
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=list(asked.tasks),
            task_manager=manager,
            num_fewshot=asked.shots,
            limit=asked.limit,
            apply_chat_template=asked.chat,
            log_samples=False,
        )
    except Exception as error:  # a data set, a metric's package, a template: anybody's
        raise TrainctlError(
            f"lm-eval cannot do {', '.join(asked.tasks)}: {type(error).__name__}: "
            f"{first_line(error)}",
            hint="data of a task comes from the hub once and is kept; code that comes with a model "
            "or data is not run",
            exit_code=ExitCode.environment,
        ) from error
    assert found is not None
    return {"results": rows_of(found), "lm_eval": version("lm_eval")}


def rows_of(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each task, metric and filter of what the harness returns."""
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


def _in_parts(
    do: Callable[..., list[Any]], requests: Sequence[Any], what: str, progress: Progress
) -> list[Any]:
    """Return a method of the model on a piece of its requests after the other."""
    size = max(1, -(-len(requests) // _PARTS))
    done: list[Any] = []
    progress(what, 0, len(requests))
    for start in range(0, len(requests), size):
        done += do(list(requests[start : start + size]), disable_tqdm=True)
        progress(what, len(done), len(requests))
    return done
