"""Checks of the files and folders that a configuration names, before anything starts.

Paths must exist. Weight files, tokenizer and corpus are checked against the model; of a corpus the
content is checked too.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from trainctl.child_processes import NoReply
from trainctl.config.codec import to_plain
from trainctl.config.registry import load_spec
from trainctl.config.schema import ModelConfig, RunConfig, TokenizerFromPath, WeightsKind
from trainctl.config.user_code import check_user_code
from trainctl.errors import Finding, Severity, TrainctlError
from trainctl.models.anatomy import parse_anatomy
from trainctl.models.directory import (
    AS_LANGUAGE_MODEL,
    OTHER_TASK,
    fetch_weights,
    is_hub_name,
    other_task_finding,
)
from trainctl.models.local_path import is_file, is_there, local_path
from trainctl.models.tensors import (
    READABLE,
    StoredTensor,
    has_pickled_weights,
    has_weights,
    join_first,
    may_be_new,
    stored_tensors,
)
from trainctl.models.tokenizer_files import (
    TokenizerFacts,
    read_chat_template,
    read_marked_template,
)
from trainctl.models.tracing import ask_inspection
from trainctl.options.adapter import low_rank
from trainctl.options.data import SampleKind, spec_of
from trainctl.options.objective.distill import DistillConfig
from trainctl.options.tokenizer import spec_of as tokenizer_of
from trainctl.plans.mixture import keyed_sources, sources_of
from trainctl.plans.shapes import all_tensors
from trainctl.plans.trainable import is_partial
from trainctl.readers.check import MISSING, check_quality_inputs, check_text
from trainctl.readers.conversations import Learn
from trainctl.readers.quality import decontamination_sections
from trainctl.readers.remote import is_url

NOT_ITS_WEIGHTS, NO_WEIGHTS, LEFT_OVER, ROTATED = "TC148", "TC145", "TC149", "TC371"
NO_PRETRAINED_WEIGHTS = "TC144"

HARMLESS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", "lm_head.weight")
"""Suffixes of tensors that are no parameters: tables, masks, a tied head."""

OTHER_HEADS = re.compile(
    r"(?:score|classifier|qa_outputs|v_head|value_head|reward_head|regression_head)\."
)
"""Names of the heads of classifiers and reward models in transformers and TRL."""

DECODERS = ("model.", "transformer.")


def check_inputs(
    config: RunConfig, *, is_quick: bool = False, resumes: bool = False
) -> list[Finding]:
    """Return the problems of weights, tokenizer and corpus that can be read.

    Args:
        is_quick: Download nothing and start no process, for commands that only plan.
        resumes: Whether the run has a checkpoint, which has all weights that train.
    """
    return [
        *check_model_files(config, is_quick=is_quick, resumes=resumes),
        *check_tokenizer_files(config),
        *check_corpus_is_meant(config),
    ]


def check_model_files(
    config: RunConfig, *, is_quick: bool = False, resumes: bool = False
) -> list[Finding]:
    """Return the problems of the weights that a run is to start from.

    Names, shapes and types are read from the headers; the values are not read. Weights from the
    Hugging Face hub are downloaded first, unless the check `is_quick`.
    """
    if not config.trains_itself or not _reads_initial_weights(config, resumes=resumes):
        return []
    if config.model.initial_weights is None:
        return list(_missing_weights(config))
    folder = local_path(config.model.initial_weights)
    if not is_there(folder):
        return []
    if is_run_or_checkpoint(folder):
        return list(_warn_of_checkpoint_removal(config, folder))
    other = _other_task(folder, config.model)
    if other is not None:
        return [other]
    try:
        if not is_quick:
            fetch_weights(str(folder))
        if not has_weights(folder) and has_pickled_weights(folder):
            return [_pickled_weights_finding(folder)]
        stored = stored_tensors(folder)
    except TrainctlError as error:
        return [_weights_finding(NO_WEIGHTS, error.message, error.hint)]
    if config.model.factory is not None:  # a factory's tensor names are unknown here
        return []
    return list(_compare_tensors(config.model, folder, stored, is_quick=is_quick))


def _reads_initial_weights(config: RunConfig, *, resumes: bool) -> bool:
    """Return True at the start, and where frozen weights are in no checkpoint."""
    return not resumes or is_partial(config)


def _missing_weights(config: RunConfig) -> Iterator[Finding]:
    """Find a fine-tuning or preference run that would start from random weights."""
    model, setting = config.model, _needs_weights(config)
    if not setting or model.weights is WeightsKind.random:
        return
    hint = "model.initial_weights=DIR"
    if model.path is None:
        hint = f"model=hf model.path=DIR, or {hint}"
    if model.weights is WeightsKind.auto:
        hint += "; model.weights=random starts from random ones"
    yield Finding(
        rule=NO_PRETRAINED_WEIGHTS,
        key="model.weights",
        message=f"{setting} goes on from trained weights, and "
        + ("none are named" if model.path is None else f"{model.path} has none"),
        hint=hint,
    )


def _needs_weights(config: RunConfig) -> str:
    """Return the setting of a fine-tuning or preference run; empty for a run from scratch."""
    if config.model.weights is WeightsKind.pretrained:
        return "model.weights=pretrained"
    if low_rank(config.adapter) is not None:
        return f"adapter.kind={config.adapter.kind}"
    if config.data.factory is None:
        for key, section in keyed_sources(config.data).items():
            if spec_of(section).encoder:
                return f"{key}.kind={section.kind}"
    return ""


def is_run_or_checkpoint(folder: Path) -> bool:
    """Return True if the weights are a run or checkpoint of trainctl, which has a manifest."""
    return (folder / "manifest.json").is_file() or (folder / "checkpoints").is_dir()


def _other_task(folder: Path, model: ModelConfig) -> Finding | None:
    """Return a finding if the config.json beside the weights is of another task."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # weights need no config.json
        return None
    has_score = model.score_outputs is not None
    found = other_task_finding(path, raw, has_score=has_score) if isinstance(raw, dict) else None
    return None if found is None else replace(found, key="model.initial_weights")


def _warn_of_checkpoint_removal(config: RunConfig, folder: Path) -> Iterator[Finding]:
    """Yield a warning if frozen weights exist only in a checkpoint that its run may remove."""
    folder = folder.resolve()
    run = folder if (folder / "checkpoints").is_dir() else folder.parent.parent
    if is_partial(config) and (folder == run or folder.parent.name == "checkpoints"):
        yield Finding(
            rule=ROTATED,
            key="model.initial_weights",
            message=f"what is trained stands on a checkpoint of {run}, which that run removes when "
            "it goes on and keeps checkpoint.keep of them",
            hint=f"trainctl export {run} DIR, and model.path=DIR; or let that run rest",
            severity=Severity.warning,
        )


def _compare_tensors(
    model: ModelConfig, folder: Path, stored: Mapping[str, StoredTensor], *, is_quick: bool
) -> Iterator[Finding]:
    problems, unused = _compare_canonical_names(model, stored)
    if problems and is_quick:
        return
    if problems and model.is_directory:
        # Published files may use other names than the model in memory; transformers maps them.
        problems, unused = _compare_by_transformers(model, folder)
    heads = [name for name in unused if OTHER_HEADS.match(name) and model.score_outputs is None]
    if heads and not any(name.endswith("lm_head.weight") for name in stored):
        yield _weights_finding(
            OTHER_TASK,
            f"the weights of {folder} have the head of another task ({join_first(heads)}) and none "
            f"over the vocabulary, which {model.name} is trained with",
            AS_LANGUAGE_MODEL,
        )
        return
    if problems:
        yield _weights_finding(
            NOT_ITS_WEIGHTS,
            f"the weights of {folder} are not {model.name}'s: {'; '.join(problems)}",
            _quantized_hint(stored)
            or "another model.initial_weights, or model.weights=random; configuration and weights "
            "belong together",
        )
    left = [name for name in unused if not name.endswith(HARMLESS)]
    if left and not problems:
        yield Finding(
            rule=LEFT_OVER,
            key="model.initial_weights",
            message=f"{len(left):,} tensors of {folder} have no place in {model.name} and are left "
            f"out: {join_first(left)}",
            severity=Severity.warning,
        )


def _compare_canonical_names(
    model: ModelConfig, stored: Mapping[str, StoredTensor]
) -> tuple[list[str], list[str]]:
    """Return the problems of weights stored under the model's own names, and the unused tensors."""
    used: set[str] = set()
    missing: list[str] = []
    others: list[str] = []
    unreadable: list[str] = []
    for own, shape in _model_tensors(model):
        name = next((name for name in _possible_names(own) if name in stored), None)
        if name is None:
            missing += [] if may_be_new(own) else [own]
            continue
        used.add(name)
        found = stored[name]
        if found.dtype not in READABLE:
            unreadable.append(f"{name} in {found.dtype}")
        elif found.shape != shape:
            sizes = f"{list(found.shape)} in {found.file}, and the model's is {list(shape)}"
            others.append(f"{name} is {sizes}")
    problems = []
    if missing:
        problems.append(f"{len(missing):,} of its tensors are not there: {join_first(missing)}")
    if others:
        problems.append(join_first(others))
    if unreadable:
        problems.append(f"quantised weights are not read: {join_first(unreadable)}")
    return problems, [name for name in stored if name not in used]


def _model_tensors(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of the model's parameters, and of the buffers stored with them."""
    yield from ((tensor.name, tensor.shape) for tensor in all_tensors(model))
    if model.anatomy:
        yield from ((buffer.name, buffer.shape) for buffer in parse_anatomy(model.anatomy).buffers)


def _possible_names(name: str) -> Iterator[str]:
    """Yield the names that files may use for a parameter: some omit the decoder's prefix."""
    yield name
    for decoder in DECODERS:
        if name.startswith(decoder):
            yield name.removeprefix(decoder)


def _compare_by_transformers(model: ModelConfig, folder: Path) -> tuple[list[str], list[str]]:
    """Return problems and unused tensors after transformers' renaming, from a child process."""
    try:
        answer = ask_inspection({"model": to_plain(model), "weights": str(folder)})
        return list(answer["problems"]), list(answer["unused"])
    except (NoReply, LookupError, TypeError) as failed:
        why = f": its process {failed}" if isinstance(failed, NoReply) else ""
        return [f"their names cannot be told{why}"], []


def _quantized_hint(stored: Mapping[str, StoredTensor]) -> str:
    """Return a hint if tensors are missing because they are quantized; empty otherwise."""
    if any(name.endswith(("_blocks", "_scales", "weight_scale_inv", "qweight")) for name in stored):
        return "the files hold quantised weights: a directory of the same model in bf16 or fp32"
    return ""


def _pickled_weights_finding(folder: Path) -> Finding:
    return _weights_finding(
        NO_WEIGHTS,
        f"{folder} has its weights in pickled form, which is not read",
        "save them as safetensors (transformers: save_pretrained), or model.weights=random",
    )


def _weights_finding(rule: str, message: str, hint: str) -> Finding:
    return Finding(rule=rule, key="model.initial_weights", message=message, hint=hint)


NO_END, MALFORMED, OTHER_IDS, PLACEHOLDER = "TC154", "TC156", "TC157", "TC410"


def check_tokenizer_files(config: RunConfig) -> list[Finding]:
    """Return the problems of the trainer's tokenizer; empty if its file is missing."""
    if not config.trains_itself:
        return []
    section = config.tokenizer
    spec = tokenizer_of(section)
    if spec.is_byte_level:
        return list(_bytes_for_other_models(config))
    is_missing = isinstance(section, TokenizerFromPath) and not section.path
    if spec.file is None or is_missing:
        return []
    file = spec.file(section)
    if not is_there(file):
        return []
    try:
        facts = spec.facts(section)
    except TrainctlError as error:
        return [
            Finding(rule=MALFORMED, key="tokenizer.path", message=error.message, hint=error.hint)
        ]
    return [
        *_check_ids_have_rows(config, facts),
        *_check_end_of_document(config, facts, file.parent),
    ]


def _check_ids_have_rows(config: RunConfig, facts: TokenizerFacts) -> Iterator[Finding]:
    rows = config.model.vocab_size
    if facts.vocab_size <= rows:
        return
    is_fixed = config.model.initial_weights is not None or not config.model.has_closed_form
    larger = f"model.vocab_size={-(-facts.vocab_size // 64) * 64}"
    yield Finding(
        rule=OTHER_IDS,
        key="tokenizer.path",
        message=f"the tokenizer has ids up to {facts.vocab_size - 1:,}, and the embedding has "
        f"model.vocab_size={rows:,} rows",
        hint="the tokenizer that belongs to the model" if is_fixed else larger,
    )


def _check_end_of_document(
    config: RunConfig, facts: TokenizerFacts, folder: Path
) -> Iterator[Finding]:
    if facts.end_of_document is not None:
        return
    yield Finding(
        rule=NO_END,
        key="tokenizer.path",
        message="the tokenizer has no end-of-document token: documents follow each other without a "
        "mark",
        hint=f"name it as eos_token in {folder}/tokenizer_config.json",
        severity=Severity.warning,
    )


def check_corpus_is_meant(config: RunConfig) -> list[Finding]:
    """Return a warning if the demonstration corpus is used with a model that is not byte-level."""
    if not config.trains_itself or config.data.factory is not None or _is_byte_level(config):
        return []
    found = []
    for key, section in keyed_sources(config.data).items():
        kind = f"{key}.kind=files" if config.data.sources else "data=files"
        if spec_of(section).is_demonstration:
            found.append(
                Finding(
                    rule=PLACEHOLDER,
                    key=f"{key}.kind",
                    message=f"{key}.kind={section.kind} is the corpus of a first try, Python's own "
                    f"source files, and {config.model.name} is no model of bytes",
                    hint=f"{kind} '{key}.paths=[/path/to/*.jsonl]'",
                    severity=Severity.warning,
                )
            )
    return found


def _is_byte_level(config: RunConfig) -> bool:
    """Return True for a byte-level model: the byte tokenizer uses most rows of its embedding."""
    spec = tokenizer_of(config.tokenizer)
    return spec.is_byte_level and (
        config.model.vocab_size < 2 * spec.facts(config.tokenizer).vocab_size
    )


def _bytes_for_other_models(config: RunConfig) -> Iterator[Finding]:
    """Yield a warning if the byte tokenizer meets a model or weights for another tokenizer."""
    folder = config.model.initial_weights
    if folder is not None and is_file(local_path(folder) / "tokenizer.json"):
        yield Finding(
            rule=OTHER_IDS,
            key="tokenizer.kind",
            message=f"the weights of {folder} know its own tokenizer's ids, and text becomes bytes",
            hint=f"tokenizer=hf tokenizer.path={folder}",
            severity=Severity.warning,
        )
    elif not _is_byte_level(config):
        ids = tokenizer_of(config.tokenizer).facts(config.tokenizer).vocab_size
        yield Finding(
            rule=PLACEHOLDER,
            key="tokenizer.kind",
            message=f"tokenizer.kind={config.tokenizer.kind} has {ids:,} ids, and "
            f"{config.model.name} has rows for {config.model.vocab_size:,}: the others never occur",
            hint="tokenizer=hf tokenizer.path=DIR, or tokenizer=file tokenizer.path=tokenizer.json",
            severity=Severity.warning,
        )


NO_TOKENIZER, NO_TEMPLATE, NO_TEACHER = "TC073", "TC367", "TC471"


def missing_files(
    config: RunConfig, folder: Path | None = None, *, resumes: bool = False
) -> list[Finding]:
    """Return a finding for each missing path, for missing code, and for each problem of the corpus.

    Args:
        folder: Where the user's code is looked up; None is the current directory.
        resumes: Whether the run has a checkpoint. Then nothing reads the initial weights, unless
            some are frozen; and the teacher only if the run has not stored its log-probabilities.
            Corpus, tokenizer, template, filters' lists and code are read at each start.
    """
    findings = [*check_user_code(config, folder), *_no_python(config)]
    if not config.trains_itself:
        return findings  # only trainctl's trainer needs corpus and tokenizer
    findings += [*check_text(config), *check_quality_inputs(config)]
    findings += [*_without_tokenizer(config), *_without_template(config)]
    findings += () if resumes else _without_teacher(config)
    findings += [
        Finding(rule=MISSING, key=key, message=f"{path} does not exist")
        for key, path in _paths(config, resumes=resumes)
        if not is_there(local_path(path))
    ]
    return findings


def reads_urls(config: RunConfig) -> bool:
    """Return True if texts of the run are under a URL."""
    sections = [*sources_of(config.data).values(), *decontamination_sections(config.data)]
    return any(
        is_url(path)
        for section in sections
        for key in ("paths", "held_out_paths")
        for path in getattr(section, key, ())
    ) or any(getattr(section, "url", None) for section in sections)


def _without_teacher(config: RunConfig) -> Iterator[Finding]:
    """Find a distillation whose teacher does not exist, or that names neither a teacher nor a
    folder of log-probabilities.
    """
    section = config.objective
    if not isinstance(section, DistillConfig):
        return
    if section.teacher and not is_there(local_path(section.teacher)):
        hint = "objective.teacher=null objective.teacher_log_probabilities=DIR reads stored ones"
        if is_hub_name(section.teacher):
            hint = f"hf download {section.teacher} --local-dir DIR; {hint}"
        yield Finding(
            rule=MISSING,
            key="objective.teacher",
            message=f"{section.teacher} does not exist",
            hint=hint,
        )
    elif not section.teacher and not section.teacher_log_probabilities:
        yield Finding(
            rule=NO_TEACHER,
            key="objective.teacher",
            message="objective.kind=distill needs a teacher",
            hint="objective.teacher=DIR (transformers directory, run or checkpoint); or "
            "objective.teacher_log_probabilities=DIR, where another run has stored them",
        )


def _without_tokenizer(config: RunConfig) -> Iterator[Finding]:
    """Find a tokenizer kind that needs a file where none is named."""
    section = config.tokenizer
    if isinstance(section, TokenizerFromPath) and not section.path:
        yield Finding(
            rule=NO_TOKENIZER,
            key="tokenizer.path",
            message=f"tokenizer.kind={section.kind} needs tokenizer.path",
            hint=f"tokenizer.path=/path/to/{load_spec('tokenizer', section.kind).path_is}",
        )


def _no_python(config: RunConfig) -> Iterator[Finding]:
    """Find a `logging.python` that cannot be executed, whether or not a logger needs it now."""
    python = config.logging.python
    if python and shutil.which(local_path(python)) is None:
        yield Finding(
            rule=MISSING,
            key="logging.python",
            message=f"{python} is no program that can be started",
            hint="the path of an environment's Python, such as /opt/trackers/bin/python",
        )


def _without_template(config: RunConfig) -> Iterator[Finding]:
    file = load_spec("tokenizer", config.tokenizer.kind).file
    is_named = not isinstance(config.tokenizer, TokenizerFromPath) or config.tokenizer.path
    for key, section in keyed_sources(config.data).items():
        source, named = load_spec("data", section.kind), getattr(section, "chat_template", None)
        # Records of plain texts need no template.
        asks = source.encoder and (named is not None or source.gives is SampleKind.text)
        if asks and config.data.factory is None and is_named:
            tokenizer = file(config.tokenizer) if file else None
            if tokenizer is None or is_file(tokenizer):  # another finding reports a missing file
                learn = getattr(section, "learn", Learn.assistant.value)
                setting = "chat_template"
                try:
                    read_chat_template(tokenizer, named)
                    setting = "learn"
                    if learn not in {each.value for each in Learn}:
                        read_marked_template(learn)
                except TrainctlError as error:
                    yield Finding(
                        rule=NO_TEMPLATE,
                        key=f"{key}.{setting}",
                        message=error.message,
                        hint=error.hint,
                    )


def _paths(config: RunConfig, *, resumes: bool) -> Iterator[tuple[str, str]]:
    if isinstance(config.tokenizer, TokenizerFromPath) and config.tokenizer.path:
        yield "tokenizer.path", config.tokenizer.path
    if config.model.initial_weights and _reads_initial_weights(config, resumes=resumes):
        yield "model.initial_weights", config.model.initial_weights
