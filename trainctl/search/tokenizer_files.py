"""Checks of the tokenizer and the corpus against the model, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainctl.config.schema import RunConfig, TokenizerFromPath
from trainctl.errors import Finding, Severity, TrainctlError
from trainctl.models.tokenizer_files import TokenizerFacts
from trainctl.options.data import spec_of as source_of
from trainctl.options.tokenizer import spec_of
from trainctl.plan.mixture import sources_of

NO_END, MALFORMED, OTHER_IDS, PLACEHOLDER = "TC154", "TC156", "TC157", "TC410"


def check_tokenizer_files(config: RunConfig) -> list[Finding]:
    """Return the problems of the trainer's tokenizer; empty if its file is missing."""
    if not config.trains_itself:
        return []
    section = config.tokenizer
    spec = spec_of(section)
    if spec.is_byte_level:
        return list(_bytes_for_other_models(config))
    is_missing = isinstance(section, TokenizerFromPath) and not section.path
    if spec.file is None or is_missing:
        return []
    file = spec.file(section)
    if not file.exists():
        return []
    try:
        facts = spec.facts(section)
    except TrainctlError as error:
        return [
            Finding(rule=MALFORMED, key="tokenizer.path", message=error.message, hint=error.hint)
        ]
    return [*_ids_have_rows(config, facts), *_documents_end(config, facts, file.parent)]


def _ids_have_rows(config: RunConfig, facts: TokenizerFacts) -> Iterator[Finding]:
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


def _documents_end(config: RunConfig, facts: TokenizerFacts, folder: Path) -> Iterator[Finding]:
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
    if not config.trains_itself or config.data.factory is not None or _is_demonstration(config):
        return []
    found = []
    for name, section in sources_of(config.data).items():
        key = f"data.sources.{name}" if config.data.sources else "data"
        kind = f"{key}.kind=files" if config.data.sources else "data=files"
        if source_of(section).is_demonstration:
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


def _is_demonstration(config: RunConfig) -> bool:
    """Return True for a byte-level model: the byte tokenizer uses most rows of its embedding."""
    spec = spec_of(config.tokenizer)
    return spec.is_byte_level and (
        config.model.vocab_size < 2 * spec.facts(config.tokenizer).vocab_size
    )


def _bytes_for_other_models(config: RunConfig) -> Iterator[Finding]:
    """Yield a warning if the byte tokenizer meets a model or weights for another tokenizer."""
    folder = config.model.initial_weights
    if folder is not None and (Path(folder).expanduser() / "tokenizer.json").is_file():
        yield Finding(
            rule=OTHER_IDS,
            key="tokenizer.kind",
            message=f"the weights of {folder} know its own tokenizer's ids, and text becomes bytes",
            hint=f"tokenizer=hf tokenizer.path={folder}",
            severity=Severity.warning,
        )
    elif not _is_demonstration(config):
        ids = spec_of(config.tokenizer).facts(config.tokenizer).vocab_size
        yield Finding(
            rule=PLACEHOLDER,
            key="tokenizer.kind",
            message=f"tokenizer.kind={config.tokenizer.kind} has {ids:,} ids, and "
            f"{config.model.name} has rows for {config.model.vocab_size:,}: the others never occur",
            hint="tokenizer=hf tokenizer.path=DIR, or tokenizer=file tokenizer.path=tokenizer.json",
            severity=Severity.warning,
        )
