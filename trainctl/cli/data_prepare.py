"""`trainctl data prepare`: tokenize the corpus of a configuration before a launch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from trainctl.cli.arguments import ConfigDir, Json, TargetAndOverrides, split_target
from trainctl.cli.console import print_json, put
from trainctl.cli.data_dropped import dropped_of, print_dropped, told
from trainctl.cli.findings import show_findings
from trainctl.cli.planning import compose_target, name_sources
from trainctl.cli.progress import bad_text_lines
from trainctl.config.compose import Composed
from trainctl.config.quality import has_quality_rules
from trainctl.errors import Finding, TrainctlError
from trainctl.hardware import resolve_hardware
from trainctl.hardware.storage import root_caches_are_protected
from trainctl.plan.mixture import sources_of
from trainctl.rules.named_files import missing_files
from trainctl.rules.resolve import resolve
from trainctl.search.input_files import check_tokenizer_files

if TYPE_CHECKING:
    from trainctl.data.corpora import Corpora
    from trainctl.data.corpus import Corpus
    from trainctl.data.progress import PreparationProgress
    from trainctl.data.tokenizer import Tokenizer


def prepare(
    target: TargetAndOverrides = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Processes; else one for each core.", show_default=False
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Only the I-th of N shares, as a job of an array: "
            "--task $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT.",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="URL",
            help="Write the corpus there as well, or into a folder: data=stream reads it.",
            show_default=False,
        ),
    ] = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Tokenize the text of a configuration, or of a run, into the cache.

    A launch does this by itself. What was tokenized before is kept, also where this is killed; the
    same command on other machines with the same cache helps.

    Examples: trainctl data prepare recipe=tiny; trainctl data prepare my-recipe --workers 32;
    trainctl data prepare my-recipe --to s3://bucket/corpus
    """
    from trainctl.data.corpora import build_corpora, tokenize_shares
    from trainctl.data.packing import packed_token_count
    from trainctl.data.prepare import TokenizingProgress, say
    from trainctl.data.progress import PreparationProgress
    from trainctl.data.tokenizer import load_tokenizer

    share = _share(task) if task is not None else None
    if share is not None and to is not None:
        raise TrainctlError(
            "--task does a share, and --to writes all", hint="--to without --task, after the shares"
        )
    name, overrides = split_target(target)
    composed = compose_target(name, overrides, config_dir)
    config = composed.config
    require_text(composed)
    elsewhere = [
        each for each, section in sources_of(config.data).items() if section.kind == "stream"
    ]
    if to is not None and elsewhere:
        raise TrainctlError(
            f"the text of {elsewhere[0]} lies elsewhere already: --to writes what is prepared here",
            hint="copy its folder",
        )
    tokenizer = load_tokenizer(config.tokenizer)
    last = PreparationProgress(0)
    tell_of = TokenizingProgress()

    def show(standing: PreparationProgress) -> None:
        nonlocal last
        last = standing if standing.is_tokenizing else last
        tell_of(standing)

    if share is not None:
        left = tokenize_shares(config, tokenizer, share, show, workers=workers)
        if as_json:
            print_json({"schema": 1, "task": task, "documents": last.documents, "left": left})
        else:
            put(f"share {task} is tokenized: {last.documents:,} documents just now")
            put(
                f"{left:,} tasks of other shares are left"
                if left
                else "all shares are: the same command without --task, or a launch, joins them"
            )
        return
    corpora = build_corpora(config, tokenizer, show, say, workers=workers)
    places = _written(corpora, tokenizer, to, is_mixture=bool(config.data.sources)) if to else {}
    left_out = list(dropped_of(config)) if has_quality_rules(config.data) else []
    if as_json:
        dropped = {"dropped": [told(each) for each in left_out]} if left_out else {}
        made = _as_json(corpora, last, is_mixture=bool(config.data.sources))
        print_json({**made, **dropped})
        return
    for name, corpus in corpora.items():
        of = f"{name}: " if config.data.sources else ""
        for side, split in (("to train on", corpus.train), ("held out", corpus.held_out)):
            put(f"{of}{split.tokens:,} tokens {side}, of {split.documents:,} documents")
        for line in bad_text_lines({"bad_text": corpus.bad_text}):
            put(f"{of}{line}")
        packed_token_count(config, corpus, put)
    just_now = f", {last.documents:,} documents tokenized just now" if last.documents else ""
    put(f"in {', '.join(corpus.folder for corpus in corpora.values())}{just_now}")
    for place in places.values():
        put(f"written to {place}: data=stream data.url={place}")
    for each in left_out:
        print_dropped(each)


def _written(
    corpora: Corpora, tokenizer: Tokenizer, to: str, *, is_mixture: bool
) -> dict[str, str]:
    """Write each corpus to `to` and return the place of each.

    Each of several sources has a folder of its name.
    """
    from trainctl.data.prepare import say
    from trainctl.data.source_sampler import SHARD_TOKENS
    from trainctl.data.streaming.corpora import upload_corpus

    base = to.rstrip("/")
    places = {name: f"{base}/{name}" if is_mixture else base for name in corpora}
    for name, corpus in corpora.items():
        upload_corpus(corpus, tokenizer, places[name], SHARD_TOKENS, say)
    return places


def _as_json(corpora: Corpora, last: PreparationProgress, *, is_mixture: bool) -> dict[str, object]:
    found = {name: _corpus(corpus) for name, corpus in corpora.items()}
    told: dict[str, object] = {"sources": found}
    if not is_mixture:
        (told,) = found.values()
    return {"schema": 1, **told, "documents_tokenized": last.documents}


def _corpus(corpus: Corpus) -> dict[str, object]:
    sides = {
        name: {"tokens": split.tokens, "documents": split.documents}
        for name, split in (("train", corpus.train), ("held_out", corpus.held_out))
    }
    return {
        "folder": corpus.folder,
        "digest": corpus.digest,
        **sides,
        "bad_text": corpus.bad_text,
    }


def _share(text: str) -> tuple[int, int]:
    """Parse `I/N` into its two numbers.

    Raises:
        TrainctlError: The text is not of this form, or I is not from 1 to N.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= count:
        raise TrainctlError(
            f"--task {text}: expected I/N, with I from 1 to N",
            hint="an array from 1, as sbatch --array=1-16, has --task $SLURM_ARRAY_TASK_ID/16",
        )
    return number, count


def require_text(composed: Composed) -> None:
    """Check that there is text to tokenize, and that a launch would accept the data and tokenizer.

    Stages are left to the launch: which are legal depends on its devices, and this machine may
    have others.

    Raises:
        TrainctlError: With all problems found.
    """
    config = composed.config
    if config.data.factory is not None:
        raise TrainctlError(
            "data.factory is asked when a run starts, and what it gives is kept with the run",
            hint="trainctl launch",
        )
    found = [
        finding
        for finding in (
            *resolve(config, resolve_hardware(config.hardware)).findings,
            *missing_files(config),
            *check_tokenizer_files(config),
        )
        if finding.key.partition(".")[0] in ("data", "tokenizer") and finding.key != "data.stages"
    ]
    found = name_sources(composed, found)
    caches = root_caches_are_protected(config, resolve_hardware(config.hardware))
    found += [each for each in caches if isinstance(each, Finding)]
    if any(finding.is_error for finding in found):
        raise TrainctlError.from_findings(found)
    show_findings(found)
