"""Published tasks of lm-eval on the model in training."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import CompileKind, RunConfig
from trainctl.config.schema.option import option
from trainctl.config.sections import callbacks_of
from trainctl.options.callbacks import CallbackConfig, CallbackSpec
from trainctl.options.limits import Limit, never_value, only_value
from trainctl.options.tokenizer import spec_of

_NAME = "task_evaluation"


@dataclass
class TaskEvaluationConfig(CallbackConfig):
    """Keys of the callback `task_evaluation`."""

    tasks: list[str] = option(
        ["arc_easy", "hellaswag"],
        "Tasks, groups or tags of lm-eval that choose among answers or read text.",
        example="[arc_easy, lambada_openai]",
    )
    every_steps: int | None = option(
        None, "Interval; null evaluates at each checkpoint.", unit="optimizer steps", minimum=1
    )
    include_path: str | None = option(
        None, "Folder with tasks of your own, in lm-eval's YAML.", local=True
    )
    samples: int | None = option(None, "Most examples of a task; null takes all.", minimum=1)
    shots: int | None = option(
        None, "Examples before each question; null takes the task's own number.", minimum=0
    )
    batch_size: int | None = option(
        None,
        "Texts in a forward pass of a rank; null takes training.micro_batch_size. The logits of "
        "all of them are in memory at once.",
        minimum=1,
    )
    chat: bool = option(False, "Whether questions are written by the tokenizer's chat template.")


def _is_ever_due(config: RunConfig) -> bool:
    own = callbacks_of(config)[_NAME]
    return own.every_steps is not None or config.checkpoint.saves_something


SPEC = CallbackSpec(
    name=_NAME,
    keys=TaskEvaluationConfig,
    build="trainctl.train.callbacks.task_evaluation:TaskEvaluation",
    modules=("lm_eval",),
    collectives=True,
    limits=(
        only_value("parallelism.pipeline", 1, "needs the whole model in one call"),
        only_value("parallelism.sequence", 1, "calls the model with whole texts"),
        only_value("parallelism.context", 1, "calls the model with whole texts"),
        never_value(
            "kernels.compile",
            CompileKind.deepcompile,
            "calls the model without labels, for which DeepCompile has no graph",
            "kernels.compile=blocks",
        ),
        Limit(
            key="tokenizer.kind",
            holds=lambda config: spec_of(config.tokenizer).published is not None,
            why="needs tokenizer files of transformers, and this kind has none",
            nearest="tokenizer=file or tokenizer=hf",
        ),
        Limit(
            key="checkpoint.every_steps",
            holds=_is_ever_due,
            why="evaluates at checkpoints, and the run saves none",
            nearest=f"callbacks.{_NAME}.every_steps=100",
        ),
    ),
)
