"""Work on a run's weights outside training, in one process: loss, samples, export, tasks.

`python -m trainctl.train.offline TASK ARGUMENTS` calls a function of `TASKS` with the arguments of
its name, a JSON object that may be cut into several words. The command line, which loads no torch,
starts it. It answers in lines of JSON on stdout: any number of `{"progress": [what, done, total]}`,
then one `{"result": {...}}` or `{"error": {...}}`. Output of libraries goes to stderr.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import TYPE_CHECKING, Any

from trainctl.errors import ExitCode, RunStateError, TrainctlError
from trainctl.runs.files import temporary_folder
from trainctl.runs.processes import die_with_parent

if TYPE_CHECKING:
    from trainctl.data.corpora import Corpora
    from trainctl.plans.types import RunPlan
    from trainctl.runs.layout import RunPaths
    from trainctl.runs.records import Progress
    from trainctl.train.models.loaded import LoadedModel


def answer(tasks: Mapping[str, Callable[..., dict[str, Any]]]) -> int:
    """Do the task on this process's command line; return the exit code.

    Args:
        tasks: Functions by the names of their tasks. They get the arguments, and `progress` by
            keyword, and return plain data.
    """
    task, *pieces = sys.argv[1:]
    # By SIGTERM a half-written export is removed when the command that started this one is gone.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    die_with_parent(death_signal=signal.SIGTERM)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # DeepSpeed is imported but starts nothing: it need not look for devices.
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def progress(what: str, done: int, total: int) -> None:
        print(json.dumps({"progress": [what, done, total]}), file=answers)

    try:
        result = tasks[task](**json.loads("".join(pieces)), progress=progress)
    except TrainctlError as error:
        print(json.dumps({"error": _error_fields(error)}), file=answers)
        return int(error.exit_code)
    print(json.dumps({"result": result}), file=answers)
    return ExitCode.success


def _error_fields(error: TrainctlError) -> dict[str, Any]:
    """Return the fields of the `error` answer, with the messages of the error's findings if any."""
    found = [each for each in error.findings if each.is_error]
    message = "; ".join(each.message for each in found) or error.message
    hint = error.hint or next((each.hint for each in found), "")
    return {"message": message, "hint": hint, "exit_code": int(error.exit_code)}


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


@dataclass(frozen=True, slots=True)
class ChosenWeights:
    """Weights of a run's checkpoint to work on."""

    run: RunPaths
    plan: RunPlan
    checkpoint: Path
    state: str
    """Name of the checkpoint's state: the master weights, or their average."""
    device: str
    """`cpu`, `cuda` or `auto`."""
    progress: Progress

    def load(self) -> LoadedModel:
        """Return the model with the weights."""
        from trainctl.train.models.loaded import load

        return load(self.plan, self.checkpoint, self.device, self.progress, weights=self.state)


def _on_weights(
    work: Callable[..., dict[str, Any]],
    *,
    run: str,
    checkpoint: str,
    weights: str = "raw",
    device: str = "auto",
    progress: Progress,
    **arguments: Any,
) -> dict[str, Any]:
    """Call a function with the chosen weights and further arguments.

    Args:
        weights: `raw`, or `ema` for the moving average.

    Raises:
        TrainctlError: Training goes on and has deleted the checkpoint meanwhile.
    """
    # Slow imports.
    from trainctl.data.user_functions import make_importable
    from trainctl.engines import patch_checks as declared
    from trainctl.engines.patches import ProcessKind
    from trainctl.runs.attempts import effective_attempt
    from trainctl.runs.directory import read_plan, read_record
    from trainctl.runs.layout import RunPaths
    from trainctl.train.checkpoint.optimizer_state import AVERAGE, MASTER

    paths, folder = RunPaths(Path(run).resolve()), Path(checkpoint)
    state = {"raw": MASTER, "ema": AVERAGE}[weights]
    try:
        plan = read_plan(paths.attempt(effective_attempt(paths).number).plan)
        declared.require_definitions(plan.config, {ProcessKind.model})
        if plan.config.model.factory is not None:
            make_importable(Path(str(read_record(paths)["folder"])))  # as on the ranks
        return work(ChosenWeights(paths, plan, folder, state, device, progress), **arguments)
    except (FileNotFoundError, ValueError):  # a file of the checkpoint, or its manifest
        if folder.is_dir():
            raise
        raise RunStateError(
            f"{folder.name} was removed while it was read",
            hint="the run goes on and keeps checkpoint.keep of them; try again",
        ) from None


def _add_tokens(
    directory: str, out: str, tokens: list[str], multiple_of: int, *, progress: Progress
) -> dict[str, Any]:
    from trainctl.train.models.new_tokens import add_tokens

    report = partial(progress, "writing")
    grown = add_tokens(Path(directory), Path(out), tokens, multiple_of=multiple_of, progress=report)
    return {"out": out, **asdict(grown)}


def _evaluate(given: ChosenWeights, samples: int | None = None) -> dict[str, Any]:
    from trainctl.data.corpora import unigram_entropy
    from trainctl.data.prepare import load_run_corpora
    from trainctl.options.data import SampleKind
    from trainctl.options.objective import REFERENCE, objective_of
    from trainctl.options.objective.distill import TEACHER
    from trainctl.train.data import held_out_data
    from trainctl.train.evaluation import evaluate_sources, scored_together
    from trainctl.train.objectives.distillation import attach_saved_teacher, sides_of
    from trainctl.train.objectives.preferences import attach_saved_reference

    plan, run = given.plan, given.run
    corpora = load_run_corpora(plan, run)
    datasets = held_out_data(plan, corpora)
    objective = objective_of(plan.config.objective)
    if objective.takes is SampleKind.prompts:
        raise TrainctlError(
            f"objective={objective.name} has no loss of held-out samples",
            hint=f"trainctl report {run.root} shows the rewards of held-out prompts",
            exit_code=ExitCode.bad_input,
        )
    if REFERENCE in objective.stored:
        attach_saved_reference(run, corpora, datasets)
    if TEACHER in objective.stored:
        attach_saved_teacher(plan, run, sides_of(corpora, datasets))
    samples = samples or plan.config.training.evaluation_samples
    if samples == 0 or not any(dataset.num_samples for dataset in datasets.values()):
        raise RunStateError(
            "the run holds out no sample to evaluate on",
            hint="data.held_out_paths or data.held_out_fraction, in a new run",
        )
    model = given.load()
    with model.inference():
        found = evaluate_sources(
            model.score,
            datasets,
            num_samples=samples,
            record=partial(objective.record, plan.config.objective),
            micro_batch_size=plan.batch.micro_batch_size,
            micro_batches=scored_together(plan, data_size=1),
            progress=partial(given.progress, "evaluating"),
        )
    assert found is not None
    return {
        "loss": found.loss,
        **({"objective": found.measures} if found.measures else {}),
        **({"sources": found.sources} if plan.config.data.sources else {}),
        "samples": found.samples,
        **({"unigram_entropy": unigram_entropy(corpora)} if objective.is_entropy else {}),
        "device": model.device.type,
    }


def _require_next_tokens(plan: RunPlan, what: str) -> None:
    """Refuse work on next tokens with a model that predicts none."""
    from trainctl.plans.shapes import is_encoder

    if plan.config.model.score_outputs is not None:
        raise TrainctlError(
            f"{what}, and objective={plan.config.objective.kind} trains a head that scores texts",
            hint="trainctl sample RUN TEXT --score; of a reward model also --answer TEXT",
        )
    if is_encoder(plan.config.model):
        raise TrainctlError(
            f"{what}, and {plan.config.model.name} is an encoder, which predicts hidden tokens",
            hint="trainctl evaluate without --tasks gives its loss on held-out text",
        )


def _score(
    given: ChosenWeights, prompt: str, answers: list[str], *, chat: bool | None = None
) -> dict[str, Any]:
    from trainctl.train.evaluation import is_chat
    from trainctl.train.tasks import scores_of

    config = given.plan.config
    if config.model.score_outputs is None:
        raise TrainctlError(
            f"objective={config.objective.kind} trains no head that scores a text",
            hint="trainctl sample RUN TEXT without --score and --answer continues it",
        )
    corpora = _recorded_corpora(given)
    classes = next(iter(corpora.values())).classes if corpora else ()
    chat = is_chat(config.data, corpora) if chat is None else chat
    model = given.load()
    with model.inference():
        found = scores_of(model, config, prompt, answers, chat=chat, classes=classes)
    return {"scored": found, "device": model.device.type}


def _recorded_corpora(given: ChosenWeights) -> Corpora:
    """Return the run's record of its corpora, in the order of its sources; empty without one."""
    from trainctl.data.corpora import load_corpora

    config, record = given.plan.config, given.run.corpus
    return load_corpora(record, config.data) if record.is_file() else {}


def _sample(
    given: ChosenWeights,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    seed: int | None = None,
    chat: bool | None = None,
    system: str | None = None,
) -> dict[str, Any]:
    from trainctl.data.tokenizer import load_tokenizer
    from trainctl.train.evaluation import prompts_of, sampled_ids

    config = given.plan.config
    _require_next_tokens(given.plan, "a text is continued by its next tokens")
    seed = config.training.seed if seed is None else seed
    tokenizer = load_tokenizer(config.tokenizer)
    prompts = prompts_of(config.data, tokenizer, chat=chat, corpora=_recorded_corpora(given))
    is_chat = prompts.template is not None
    if system is not None and not is_chat:
        raise TrainctlError(
            "--system is of conversations, and the text is taken as it stands", hint="--chat"
        )
    ids = prompts.ids(prompt, system)
    model = given.load()
    with model.inference():
        drawn = sampled_ids(
            model.next_scores,
            ids,
            num_tokens=tokens,
            window=config.training.sequence_length,
            seed=seed,
            vocab_size=tokenizer.vocab_size,
            ends=prompts.ends,
            temperature=temperature,
            progress=partial(given.progress, "sampling"),
        )
    text = tokenizer.decode(drawn if is_chat else [*ids, *drawn])
    return {"text": text, "chat": is_chat, "seed": seed, "device": model.device.type}


def _export(
    given: ChosenWeights, *, out: str, function: str, options: dict[str, Any], check: str = ""
) -> dict[str, Any]:
    from trainctl.plans.settings import number_formats
    from trainctl.train.models.model import TORCH_TYPES

    config, checkpoint, folder = given.plan.config, given.checkpoint, Path(out).resolve()
    named = {name: value for name, value in options.items() if value is not None}
    dtype = named.get("dtype")
    if "dtype" in options:
        dtype = dtype or number_formats(config.precision).weights.value
        named["dtype"] = {kind.value: each for kind, each in TORCH_TYPES.items()}.get(dtype, dtype)
    if "weights" in options:
        named["weights"] = given.state
    report = partial(given.progress, "exporting")
    exported = resolve_name(function)(config, checkpoint, folder, progress=report, **named)
    checked: dict[str, Any] = {}
    if check:
        given.progress("checking", 0, 1)
        named.pop("shard_bytes", None)
        checked = {"check": resolve_name(check)(config, checkpoint, folder, **named).to_json()}
    return {
        "out": str(folder),
        **({"dtype": dtype} if dtype else {}),
        "files": exported.files,
        "bytes": exported.size_bytes,
        "parameters": exported.num_parameters,
        "notes": exported.notes,
        **checked,
    }


def _require_task_model(plan: RunPlan) -> None:
    """Refuse a model that lm-eval's tasks cannot ask."""
    from trainctl.options.tokenizer import spec_of

    _require_next_tokens(plan, "--tasks ask for the probability of a text's next tokens")
    if plan.config.model.is_module:
        raise TrainctlError(
            "--tasks asks models of transformers, and this one is a module of your own",
            hint="without --tasks the held-out loss is evaluated",
        )
    if spec_of(plan.config.tokenizer).published is None:
        why = spec_of(plan.config.tokenizer).why_not_published
        raise TrainctlError(f"--tasks needs tokenizer files: {why}")
    if plan.config.model.trust_remote_code:
        raise TrainctlError(
            "the model has code of its own, and --tasks runs none of it",
            hint="trainctl export, and lm_eval --trust_remote_code on that folder",
        )


def _evaluate_tasks(
    given: ChosenWeights,
    *,
    names: list[str],
    include: str | None = None,
    shots: int | None = None,
    samples: int | None = None,
    batch_size: int | None = None,
    chat: bool = False,
    keep: str | None = None,
) -> dict[str, Any]:
    from trainctl.plans.settings import number_formats
    from trainctl.runs.manifest import read_manifest
    from trainctl.train.evaluation import first_source
    from trainctl.train.export.directory import export
    from trainctl.train.models.loaded import choose_device
    from trainctl.train.models.model import TORCH_TYPES
    from trainctl.train.tasks import TaskRequest, evaluate_tasks, manager_of

    plan, progress = given.plan, given.progress
    choose_device(given.device, 0)  # before the export, which may take long
    _require_task_model(plan)
    asked = TaskRequest(
        names,
        None if include is None else Path(include),
        shots,
        samples,
        batch_size or plan.batch.micro_batch_size,
        chat,
        getattr(first_source(plan.config.data), "template_arguments", {}),
    )
    progress("looking for tasks", 0, 1)
    manager = manager_of(asked)
    step = read_manifest(given.checkpoint)["step"]
    dtype = TORCH_TYPES[number_formats(plan.config.precision).weights]
    with temporary_folder() as temporary:
        folder = Path(keep or f"{temporary}/model").resolve()
        exported = export(
            plan.config,
            given.checkpoint,
            folder,
            dtype=dtype,
            weights=given.state,
            progress=partial(progress, "exporting"),
        )
        device = choose_device(given.device, exported.size_bytes).type
        found = evaluate_tasks(
            folder,
            manager,
            asked,
            device=device,
            dtype=str(dtype).removeprefix("torch."),
            progress=progress,
        )
    return {"step": step, **found, "device": device}


TASKS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "add-tokens": _add_tokens,
    "evaluate": partial(_on_weights, _evaluate),
    "export": partial(_on_weights, _export),
    "sample": partial(_on_weights, _sample),
    "score": partial(_on_weights, _score),
    "tasks": partial(_on_weights, _evaluate_tasks),
}
"""Functions of the tasks, by name."""


if __name__ == "__main__":
    sys.exit(answer(TASKS))
