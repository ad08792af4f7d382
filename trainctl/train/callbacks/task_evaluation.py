"""lm-eval's tasks on the model in training, on all ranks together.

lm-eval runs on the first rank alone. The texts that it wants scored go to all ranks, which share
them: each rank runs equally many forward passes (ZeRO-3 gathers parameters in each), and the first
rank gets the log-likelihoods.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.extras import install_command
from trainctl.config.suggest import first_line
from trainctl.errors import ExitCode, TrainctlError
from trainctl.models.local_path import local_path
from trainctl.options.callbacks import Callback, Context
from trainctl.options.callbacks.task_evaluation import TaskEvaluationConfig
from trainctl.plans.settings import number_formats
from trainctl.runs.files import temporary_folder
from trainctl.train.evaluation import first_source, inference
from trainctl.train.export.directory import write_all_but_weights
from trainctl.train.models.model import TORCH_TYPES, skeleton, with_portable_attention
from trainctl.train.tasks import TaskRequest, manager_of, rows_of_tasks

Text = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids of a model input, and of the continuation that ends one position behind it."""
Score = tuple[float, bool]
"""Log-likelihood of a continuation, and whether greedy decoding would give it."""

ROLLING_TEXTS = 1024
"""Windows of long texts that are scored together, over all ranks."""


class TasksStopped(Exception):
    """End of an evaluation of tasks because the run is to stop; raised on all ranks."""


class TaskEvaluation(Callback):
    """Evaluates tasks after a step and records their metrics."""

    def __init__(self, keys: TaskEvaluationConfig) -> None:
        self._keys = keys
        self._model: Any = None
        self._manager: Any = None

    def on_train_start(self, context: Context) -> None:
        config, keys = context.plan.config, self._keys
        self._length: int = config.training.sequence_length
        self._batch_size = keys.batch_size or context.plan.batch.micro_batch_size
        self._asked = TaskRequest(
            keys.tasks,
            local_path(keys.include_path) if keys.include_path else None,
            keys.shots,
            keys.samples,
            self._batch_size,
            keys.chat,
            getattr(first_source(config.data), "template_arguments", {}),
        )
        # Without a heartbeat: that of the start allows for a download.
        self._together(context, self._prepare)

    def after_agreement(self, context: Context, sums: Sequence[float]) -> None:
        every = self._keys.every_steps
        if context.is_saving if every is None else context.step % every == 0:
            with inference(context.module), suppress(TasksStopped):
                self._together(context, self._evaluate)

    def _together(self, context: Context, lead: Callable[[Context], None]) -> None:
        """Run a function on the first rank, while the others score what it asks for.

        Raises:
            TrainctlError: The function failed; on all ranks.
        """
        problem, cause = "", None
        if context.rank == 0:
            try:
                with undisturbed_random(context.device):
                    lead(context)
            except TasksStopped:
                raise
            except Exception as error:  # raised by any data set, metric package or template
                problem, cause = _error_text(error), error
            context.collectives.broadcast(problem)
        else:
            while not isinstance(asked := context.collectives.broadcast(None), str):
                self._scores(context, asked)
            problem = asked
        if problem:
            failure = TrainctlError(
                f"the callback task_evaluation failed on {', '.join(self._keys.tasks)} at step "
                f"{context.step}: {problem}",
                hint="data of a task comes from the hub once and is kept; "
                "resume goes on from the last checkpoint",
                exit_code=ExitCode.training_failed,
            )
            raise failure.of_all_ranks() from cause

    def _prepare(self, context: Context) -> None:
        """Read the tasks and their data, and make the model that lm-eval asks."""
        if find_spec("lm_eval") is None:
            raise TrainctlError(f"lm_eval is not installed: {install_command('lm_eval')}")
        self._manager = manager_of(self._asked)
        for name, task in self._manager.load(list(self._keys.tasks))["tasks"].items():
            if task.get_config("output_type") == "generate_until":
                raise TrainctlError(
                    f"{name} generates text, which takes a forward pass of the whole model for "
                    "each token: use `trainctl evaluate --tasks` on a checkpoint"
                )
        config = context.plan.config
        dtype = TORCH_TYPES[number_formats(config.precision).weights]
        model = skeleton(with_portable_attention(config.model), dtype)
        with temporary_folder() as folder:
            write_all_but_weights(model, config, dtype, folder)
            self._model = model_of_ranks(
                model,
                str(folder),
                self._asked,
                max_length=self._length,
                scores=lambda texts: self._asked_of_all(context, texts),
            )

    def _evaluate(self, context: Context) -> None:
        # Standard errors of some metrics would come from processes that lm-eval forks.
        rows = rows_of_tasks(
            self._model, self._manager, self._asked, torch_random_seed=None, bootstrap_iters=0
        )
        tasks: dict[str, dict[str, Any]] = {}
        for row in rows:
            metric = row["metric"] + ("" if row["filter"] == "none" else f"_{row['filter']}")
            values = tasks.setdefault(row["task"], {"samples": row["samples"]})
            values[metric] = row["value"]
        for task, values in tasks.items():
            context.record(task, **values)

    def _asked_of_all(self, context: Context, texts: Sequence[Text]) -> list[Score]:
        context.collectives.broadcast(texts)
        return self._scores(context, texts)

    def _scores(self, context: Context, texts: Sequence[Text]) -> list[Score]:
        """Return the score of each text; on all ranks together.

        Args:
            texts: The same on all ranks.

        Raises:
            TasksStopped: The run is to stop.
        """
        passes: dict[tuple[int, ...], list[int]] = {}
        for index, (given, _) in enumerate(texts):  # answers of a token share one pass
            passes.setdefault(given, []).append(index)
        inputs = sorted(passes, key=len, reverse=True)
        mesh, size = context.plan.mesh, self._batch_size
        ranks, rank = context.world_size // mesh.tensor, context.rank // mesh.tensor
        is_compiled = context.plan.config.kernels.is_compiled
        own: dict[int, Score] = {}
        for start in range(0, len(inputs), size * ranks):
            context.beat(f"evaluating tasks: text {start:,} of {len(inputs):,}")
            if context.should_stop():
                raise TasksStopped
            mine = inputs[start + rank * size :][:size]
            # Code compiled for the shape of training is not compiled again.
            length = self._length if is_compiled else len(inputs[start])
            length += -length % mesh.tensor
            ids = torch.zeros(size, length, dtype=torch.long)
            for row, given in enumerate(mine):
                ids[row, : len(given)] = torch.tensor(given)
            logits = context.module({"input_ids": ids.to(context.device), "use_cache": False})
            for row, given in enumerate(mine):
                for index in passes[given]:
                    own[index] = _continuation_score(logits[row, : len(given)], texts[index][1])
        every: dict[int, Score] = {}
        for found in context.collectives.gather(own):
            every |= found
        return [every[index] for index in range(len(texts))]


def model_of_ranks(
    model: PreTrainedModel,
    tokenizer: str,
    asked: TaskRequest,
    *,
    max_length: int,
    scores: Callable[[Sequence[Text]], list[Score]],
) -> Any:
    """Return lm-eval's `HFLM`, whose log-likelihoods come from a function.

    Args:
        model: Has the configuration; its weights are not read.
        tokenizer: A transformers directory, read at once.
        max_length: Most tokens of an input; longer ones lose their beginning.
    """
    from lm_eval.models.huggingface import HFLM

    class OfRanks(HFLM):  # type: ignore[misc]
        """`HFLM` that runs no model."""

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
            return super().loglikelihood(requests, disable_tqdm=True)

        def loglikelihood_rolling(
            self, requests: list[Any], disable_tqdm: bool = False
        ) -> list[Any]:
            return super().loglikelihood_rolling(requests, disable_tqdm=True)

        def _loglikelihood_tokens(
            self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
        ) -> list[Score]:
            texts: list[Text] = []
            for _, context, continuation in requests:
                if len(continuation) > max_length:
                    raise TrainctlError(
                        f"an answer of {len(continuation):,} tokens is longer than "
                        f"training.sequence_length={max_length}"
                    )
                whole = (*context, *continuation)[-(max_length + 1) :]
                texts.append((whole[:-1], tuple(continuation)))
            return scores(texts)

        def get_model_info(self) -> dict[str, Any]:
            return {}  # it would ask the hub

    return OfRanks(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=ROLLING_TEXTS,
        max_length=max_length,
        chat_template_args=dict(asked.template_arguments),
    )


def _continuation_score(logits: torch.Tensor, continuation: tuple[int, ...]) -> Score:
    scores = logits[-len(continuation) :].float().log_softmax(dim=-1)
    ids = torch.tensor(continuation, device=scores.device)
    total = scores.gather(1, ids[:, None]).sum()
    return float(total), bool((scores.argmax(dim=1) == ids).all())


@contextmanager
def undisturbed_random(device: torch.device) -> Iterator[None]:
    """Run the block, which may seed all random generators, and restore their states."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _error_text(error: Exception) -> str:
    if isinstance(error, TrainctlError):
        return f"{error.message}; {error.hint}" if error.hint else error.message
    return f"{type(error).__name__}: {first_line(error)}"
