"""Scores of a model: published tasks by EleutherAI's lm-eval (the extra `eval`), on an exported
model; and what a model with a head of its own gives to texts of the user's.

lm-eval's `TaskManager`, `HFLM` and `simple_evaluate` do the work; this module holds the request,
reports progress and turns the results into rows. Code that comes with a model or a data set is not
run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainctl.config.schema import RunConfig
from trainctl.config.suggest import did_you_mean, first_line, nearest_names
from trainctl.data.record_encoders import AnswerEncoder
from trainctl.data.token_arrays import loss_mask_of, without_marks
from trainctl.data.tokenizer import encoder_of, load_tokenizer
from trainctl.errors import MachineError, TrainctlError
from trainctl.options.data import SampleKind
from trainctl.options.objective import objective_of
from trainctl.options.objective.classify import ClassifyConfig, Labelling
from trainctl.runs.records import Progress
from trainctl.train.evaluation import first_source
from trainctl.train.models.loaded import LoadedModel

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


def scores_of(
    model: LoadedModel,
    config: RunConfig,
    prompt: str,
    answers: Sequence[str],
    *,
    chat: bool = False,
    classes: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return the scores of each answer to a prompt; without answers, of the prompt as a text.

    Each has the text and `scores` by name: `reward`; a probability for each class, or the numbers
    of a regression; or the probability of each step that it is right.

    Args:
        chat: Whether prompt and answers are messages, which the chat template renders.
        classes: Names of the classes, in the order of their numbers.

    Raises:
        TrainctlError: The model needs answers and there are none, or a text has no token.
    """
    takes = objective_of(config.objective).takes
    if takes in (SampleKind.pairs, SampleKind.steps) and not answers:
        raise TrainctlError("a reward is of an answer, and none is named", hint="--answer TEXT")
    found = []
    for text, record in _records(config, takes, prompt, answers, chat=chat):
        ids, marks = _encode(config, takes, record)
        if len(ids) > config.training.sequence_length:
            raise TrainctlError(
                f"{text!r:.60} has {len(ids):,} tokens, and the model was trained on "
                f"{config.training.sequence_length:,} (training.sequence_length)"
            )
        outputs = model.scores(ids)
        if takes is SampleKind.steps:
            chances = outputs[torch.tensor(marks), 0].sigmoid().tolist()
            scores = {f"step {n}": chance for n, chance in enumerate(chances, 1)}
        else:
            scores = _outputs_by_name(config, outputs[-1], classes)
        found.append({"text": text, "scores": scores})
    return found


def _records(
    config: RunConfig, takes: SampleKind, prompt: str, answers: Sequence[str], *, chat: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each text to score, with its record as the run's data source makes it."""
    if takes is SampleKind.pairs:
        for answer in answers:
            asked: Any = [{"role": "user", "content": prompt}] if chat else prompt
            said: Any = [{"role": "assistant", "content": answer}] if chat else answer
            yield answer, {"prompt": asked, "completion": said, "label": True}
    elif takes is SampleKind.steps:
        separator = first_source(config.data).step_separator  # type: ignore[attr-defined]
        for answer in answers:
            steps = [step for step in answer.split(separator) if step]
            yield answer, {"prompt": prompt, "completions": steps, "labels": [0.0] * len(steps)}
    else:
        for second in answers or [""]:
            yield second or prompt, {"texts": [prompt, second] if second else [prompt], "label": []}


def _encode(
    config: RunConfig, takes: SampleKind, record: dict[str, Any]
) -> tuple[list[int], list[bool]]:
    """Return the ids of a record, and which of them are marked."""
    tokenizer, section = load_tokenizer(config.tokenizer), first_source(config.data)
    # One answer of a pair is written as a single answer is.
    is_pair = takes is SampleKind.pairs
    encoder: Any = AnswerEncoder if is_pair else encoder_of
    encoder = encoder(section, tokenizer)
    (marked,) = encoder.encode_all([json.dumps(record)])
    stored = marked.astype("<u2" if encoder.vocab_size <= 1 << 16 else "<u4")
    return without_marks(stored).tolist(), loss_mask_of(stored).tolist()


def _outputs_by_name(
    config: RunConfig, outputs: torch.Tensor, classes: Sequence[str]
) -> dict[str, float]:
    """Return the outputs for a text by name, (outputs,)."""
    section = config.objective
    if not isinstance(section, ClassifyConfig):
        names = ["reward"] if len(outputs) == 1 else [str(n) for n in range(len(outputs))]
        return dict(zip(names, outputs.tolist(), strict=True))
    if section.problem is Labelling.single_label:
        outputs = outputs.softmax(dim=-1)
    elif section.problem is Labelling.multi_label:
        outputs = outputs.sigmoid()
    names = [*classes, *map(str, range(len(classes), len(outputs)))]
    return dict(zip(names, outputs.tolist(), strict=True))
