"""Work on a run's weights outside training, in one process: loss, samples, export, tasks.

`python -m trainctl.train.offline TASK RUN_DIR CHECKPOINT ...`, or `add-tokens DIR OUT TOKENS`. The
command line, which loads no torch, starts it. It answers in lines of JSON on stdout: any number of
`{"progress": [what, done, total]}`, then one `{"result": {...}}` or `{"error": {...}}`. Output of
libraries goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import TYPE_CHECKING, Any

from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.processes import die_with_parent

if TYPE_CHECKING:
    from trainctl.plans.types import RunPlan
    from trainctl.runs.layout import RunPaths

Progress = Callable[[str, int, int], None]

DEVICES = ("auto", "cpu", "cuda")
WEIGHTS = ("raw", "ema")


def main() -> int:
    """Do the task; return the exit code."""
    return answer(partial(_run_task, _parser().parse_args()))


def answer(work: Callable[[Progress], dict[str, Any]]) -> int:
    """Do a piece of work in this process, which another one started; return the exit code.

    Args:
        work: Takes the receiver of its progress, and returns its result as plain data.
    """
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
        result = work(progress)
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


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("run", type=Path)
    common.add_argument("checkpoint", type=Path)
    common.add_argument("--weights", choices=WEIGHTS, default="raw")
    parser = argparse.ArgumentParser(prog="python -m trainctl.train.offline")
    tasks = parser.add_subparsers(dest="task", required=True)
    evaluate = tasks.add_parser("evaluate", parents=[common])
    evaluate.add_argument("--samples", type=int)
    sample = tasks.add_parser("sample", parents=[common])
    sample.add_argument("--prompt", required=True)
    sample.add_argument("--tokens", type=int, required=True)
    sample.add_argument("--temperature", type=float, required=True)
    sample.add_argument("--seed", type=int)
    sample.add_argument("--chat", action=argparse.BooleanOptionalAction)
    sample.add_argument("--system")
    score = tasks.add_parser("score", parents=[common])
    score.add_argument("--prompt", required=True)
    score.add_argument("--answer", action="append", default=[])
    score.add_argument("--chat", action="store_true")
    for task in (evaluate, sample, score):
        task.add_argument("--device", choices=DEVICES, default="auto")
    export = tasks.add_parser("export", parents=[common])
    export.add_argument("out", type=Path)
    export.add_argument("--function", required=True)
    export.add_argument("--options", type=json.loads, default={})
    export.add_argument("--check")
    tasks_of = tasks.add_parser("tasks", parents=[common])
    tasks_of.add_argument("--name", action="append", required=True)
    tasks_of.add_argument("--include", type=Path)
    tasks_of.add_argument("--shots", type=int)
    tasks_of.add_argument("--limit", type=int)
    tasks_of.add_argument("--batch-size", type=int)
    tasks_of.add_argument("--chat", action="store_true")
    tasks_of.add_argument("--keep", type=Path)
    tasks_of.add_argument("--device", choices=DEVICES, default="auto")
    tokens = tasks.add_parser("add-tokens")
    tokens.add_argument("folder", type=Path)
    tokens.add_argument("out", type=Path)
    tokens.add_argument("tokens", type=json.loads)
    tokens.add_argument("--multiple-of", type=int, default=1)
    return parser


def _run_task(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Do the task.

    Raises:
        TrainctlError: Training goes on and has deleted the checkpoint meanwhile.
    """
    if arguments.task == "add-tokens":
        return _add_tokens(arguments, progress)
    try:
        return _dispatch_task(arguments, progress)
    except (FileNotFoundError, ValueError):  # a file of the checkpoint, or its manifest
        if arguments.checkpoint.is_dir():
            raise
        raise TrainctlError(
            f"{arguments.checkpoint.name} was removed while it was read",
            hint="the run goes on and keeps checkpoint.keep of them; try again",
            exit_code=ExitCode.run_state,
        ) from None


def _dispatch_task(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    # Slow imports.
    from trainctl.data.user_functions import make_importable
    from trainctl.engines import patch_checks as declared
    from trainctl.engines.patches import ProcessKind
    from trainctl.runs.attempts import effective_attempt
    from trainctl.runs.directory import read_plan, read_record
    from trainctl.runs.layout import RunPaths

    run = RunPaths(arguments.run.resolve())
    plan = read_plan(run.attempt(effective_attempt(run).number).plan)
    declared.require_definitions(plan.config, {ProcessKind.model})
    if plan.config.model.factory is not None:
        make_importable(Path(str(read_record(run)["folder"])))  # as on the ranks
    match arguments.task:
        case "evaluate":
            return _evaluate(plan, run, arguments, progress)
        case "sample":
            return _sample(plan, arguments, progress)
        case "score":
            return _score(plan, run, arguments, progress)
        case "tasks":
            return _evaluate_tasks(plan, arguments, progress)
        case _:
            return _export(plan, arguments, progress)


def _add_tokens(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    from trainctl.train.models.new_tokens import add_tokens

    grown = add_tokens(
        arguments.folder,
        arguments.out,
        arguments.tokens,
        multiple_of=arguments.multiple_of,
        progress=lambda done, total: progress("writing", done, total),
    )
    return {"out": str(arguments.out), **asdict(grown)}


def _state_name(arguments: argparse.Namespace) -> str:
    """Return the name of the checkpoint state that `--weights` selects."""
    from trainctl.train.checkpoint.optimizer_state import AVERAGE, MASTER

    return AVERAGE if arguments.weights == "ema" else MASTER


def _evaluate(
    plan: RunPlan, run: RunPaths, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    from trainctl.data.corpora import unigram_entropy
    from trainctl.data.prepare import load_run_corpora
    from trainctl.options.data import SampleKind
    from trainctl.options.objective import REFERENCE, objective_of
    from trainctl.options.objective.distill import TEACHER
    from trainctl.train.data import held_out_data
    from trainctl.train.evaluation import evaluate_sources, scored_together
    from trainctl.train.models.loaded import load
    from trainctl.train.objectives.distillation import attach_saved_teacher, sides_of
    from trainctl.train.objectives.preferences import attach_saved_reference

    corpora = load_run_corpora(plan, run)
    datasets = held_out_data(plan, corpora)
    objective = objective_of(plan.config.objective)
    if objective.takes is SampleKind.prompts:
        raise TrainctlError(
            f"objective={objective.name} has no loss of held-out samples",
            hint=f"trainctl report {run.root.name} shows the rewards of held-out prompts",
            exit_code=ExitCode.bad_input,
        )
    if REFERENCE in objective.stored:
        attach_saved_reference(run, corpora, datasets)
    if TEACHER in objective.stored:
        attach_saved_teacher(plan, run, sides_of(corpora, datasets))
    samples = arguments.samples or plan.config.training.evaluation_samples
    if samples == 0 or not any(dataset.num_samples for dataset in datasets.values()):
        raise TrainctlError(
            "the run holds out no sample to evaluate on",
            hint="data.held_out_paths or data.held_out_fraction, in a new run",
            exit_code=ExitCode.run_state,
        )
    weights = _state_name(arguments)
    model = load(plan, arguments.checkpoint, arguments.device, progress, weights=weights)
    with model.inference():
        found = evaluate_sources(
            model.score,
            datasets,
            num_samples=samples,
            record=partial(objective.record, plan.config.objective),
            micro_batch_size=plan.batch.micro_batch_size,
            micro_batches=scored_together(plan, data_size=1),
            progress=lambda done, total: progress("evaluating", done, total),
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
    plan: RunPlan, run: RunPaths, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    from trainctl.data.corpora import load_corpora
    from trainctl.train.models.loaded import load
    from trainctl.train.scoring import scores_of

    config = plan.config
    if config.model.score_outputs is None:
        raise TrainctlError(
            f"objective={config.objective.kind} trains no head that scores a text",
            hint="trainctl sample RUN TEXT without --score and --answer continues it",
        )
    classes: tuple[str, ...] = ()
    if run.corpus.is_file():
        classes = next(iter(load_corpora(run.corpus, config.data).values())).classes
    weights = _state_name(arguments)
    model = load(plan, arguments.checkpoint, arguments.device, progress, weights=weights)
    with model.inference():
        found = scores_of(
            model, config, arguments.prompt, arguments.answer, chat=arguments.chat, classes=classes
        )
    return {"scored": found, "device": model.device.type}


def _sample(plan: RunPlan, arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    from trainctl.data.tokenizer import load_tokenizer
    from trainctl.train.evaluation import prompts_of, sampled_ids
    from trainctl.train.models.loaded import load

    _require_next_tokens(plan, "a text is continued by its next tokens")
    training = plan.config.training
    seed = training.seed if arguments.seed is None else arguments.seed
    tokenizer = load_tokenizer(plan.config.tokenizer)
    prompts = prompts_of(plan.config.data, tokenizer, chat=arguments.chat)
    is_chat = prompts.template is not None
    if arguments.system is not None and not is_chat:
        raise TrainctlError(
            "--system is of conversations, and the text is taken as it stands", hint="--chat"
        )
    ids = prompts.ids(arguments.prompt, arguments.system)
    weights = _state_name(arguments)
    model = load(plan, arguments.checkpoint, arguments.device, progress, weights=weights)
    with model.inference():
        drawn = sampled_ids(
            model.next_scores,
            ids,
            num_tokens=arguments.tokens,
            window=training.sequence_length,
            seed=seed,
            vocab_size=tokenizer.vocab_size,
            ends=prompts.ends,
            temperature=arguments.temperature,
            progress=lambda done, total: progress("sampling", done, total),
        )
    text = tokenizer.decode(drawn if is_chat else [*ids, *drawn])
    return {"text": text, "chat": is_chat, "seed": seed, "device": model.device.type}


def _export(plan: RunPlan, arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    from trainctl.plans.settings import number_formats
    from trainctl.train.models.model import TORCH_TYPES

    given = {name: value for name, value in arguments.options.items() if value is not None}
    dtype = given.get("dtype")
    if "dtype" in arguments.options:
        dtype = dtype or number_formats(plan.config.precision).weights.value
        given["dtype"] = {kind.value: each for kind, each in TORCH_TYPES.items()}.get(dtype, dtype)
    if "weights" in given:
        given["weights"] = _state_name(arguments)
    out = arguments.out.resolve()
    exported = resolve_name(arguments.function)(
        plan.config,
        arguments.checkpoint,
        out,
        progress=lambda done, total: progress("exporting", done, total),
        **given,
    )
    checked: dict[str, Any] = {}
    if arguments.check:
        progress("checking", 0, 1)
        given.pop("shard_bytes", None)
        made = resolve_name(arguments.check)(plan.config, arguments.checkpoint, out, **given)
        checked = {"check": made.to_json()}
    return {
        "out": str(out),
        **({"dtype": dtype} if dtype else {}),
        "files": exported.files,
        "bytes": exported.size_bytes,
        "parameters": exported.num_parameters,
        "notes": exported.notes,
        **checked,
    }


def _evaluate_tasks(
    plan: RunPlan, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    from trainctl.options.tokenizer import spec_of
    from trainctl.plans.settings import number_formats
    from trainctl.runs.manifest import read_manifest
    from trainctl.train.evaluation import first_source
    from trainctl.train.export.directory import export
    from trainctl.train.models.loaded import choose_device
    from trainctl.train.models.model import TORCH_TYPES
    from trainctl.train.tasks import TaskRequest, evaluate_tasks, manager_of

    _require_next_tokens(plan, "--tasks ask for the probability of a text's next tokens")
    if plan.config.model.is_module:
        raise TrainctlError(
            "--tasks asks models of transformers, and this one is a module of your own",
            hint="without --tasks the held-out loss is evaluated",
        )
    choose_device(arguments.device, 0)  # before the export, which may take long
    if spec_of(plan.config.tokenizer).published is None:
        why = spec_of(plan.config.tokenizer).why_not_published
        raise TrainctlError(f"--tasks needs tokenizer files: {why}")
    if plan.config.model.trust_remote_code:
        raise TrainctlError(
            "the model has code of its own, and --tasks runs none of it",
            hint="trainctl export, and lm_eval --trust_remote_code on that folder",
        )
    asked = TaskRequest(
        arguments.name,
        arguments.include,
        arguments.shots,
        arguments.limit,
        arguments.batch_size or plan.batch.micro_batch_size,
        arguments.chat,
        getattr(first_source(plan.config.data), "template_arguments", {}),
    )
    progress("looking for tasks", 0, 1)
    manager = manager_of(asked)
    step = read_manifest(arguments.checkpoint)["step"]
    dtype = TORCH_TYPES[number_formats(plan.config.precision).weights]
    with tempfile.TemporaryDirectory(prefix="trainctl-") as temporary:
        folder = (arguments.keep or Path(temporary) / "model").resolve()
        exported = export(
            plan.config,
            arguments.checkpoint,
            folder,
            dtype=dtype,
            weights=_state_name(arguments),
            progress=lambda done, total: progress("exporting", done, total),
        )
        device = choose_device(arguments.device, exported.size_bytes).type
        found = evaluate_tasks(
            folder,
            manager,
            asked,
            device=device,
            dtype=str(dtype).removeprefix("torch."),
            progress=progress,
        )
    return {"step": step, **found, "device": device}


if __name__ == "__main__":
    sys.exit(main())
