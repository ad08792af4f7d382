"""Contents of samples: their text, and the files and documents they were cut from. No torch."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainctl.config.schema import DataConfig, OnBadText
from trainctl.data.corpus import Corpus
from trainctl.data.corpus_record import FILES
from trainctl.data.infilling import infilling_settings
from trainctl.data.mixture import sample_order
from trainctl.data.packing import load_bins, packed_token_count
from trainctl.data.sample_reader import SampleReader
from trainctl.data.targets import name_targets
from trainctl.data.tokenizer import FileTokenizer, Tokenizer
from trainctl.errors import RunStateError, TrainctlError
from trainctl.options.data import spec_of
from trainctl.options.objective.grpo import answers_per_prompt
from trainctl.plans.mixture import sources_of, stages_of_plan
from trainctl.plans.types import RunPlan
from trainctl.readers.documents import Reader, split_documents
from trainctl.readers.files import TextFiles, split_files
from trainctl.readers.remote import File, is_url
from trainctl.runs.records import Event, step_curve

MOST_SAMPLES = 1000
"""Maximum number of samples shown at once."""
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class Passage:
    """The part of a sample that belongs to one document."""

    document: int
    """Number of the document in the training split, from 0."""
    file: str | None
    line: int | None
    """Line or row of the file, from 1; None if the file is one document."""
    start: int
    """First token of the passage, counted in the document."""
    end: int
    """End of the passage (exclusive), counted in the document."""


@dataclass(frozen=True, slots=True)
class ChatStretch:
    """Consecutive tokens of a sample that all have a loss, or all have none."""

    text: str
    has_loss: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """Content of a sample."""

    counter: int
    """Sample counter in the run's order, as in the records."""
    source: str
    """Name of the source; `plan.mixture.SINGLE_SOURCE` if the run has one source."""
    index: int
    """Index in the source, in samples of the stage's length."""
    epoch: int
    first_token: int
    """Position of the sample (of its first passage, if packed) in the training split."""
    passages: tuple[Passage, ...]
    text: str
    is_cut: bool
    stretches: tuple[ChatStretch, ...] = ()
    """Text divided by the loss mask; only of sources with loss marks."""
    targets: tuple[float | str, ...] = ()
    """Numbers beside the record, such as its label; class names instead of their numbers."""


def parse_counters(text: str) -> list[int]:
    """Parse sample counters like ``12,40-44``. Ranges include both ends.

    Raises:
        TrainctlError: The text is invalid, or names more than `MOST_SAMPLES` samples.
    """
    counters: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise TrainctlError(
                f"--samples {text}: {part!r} is neither a number nor a range",
                hint="--samples 12,40-44",
            )
        if len(counters) + last - first >= MOST_SAMPLES:
            raise TrainctlError(
                f"--samples {text}: more than {MOST_SAMPLES:,} samples", hint="ask for fewer"
            )
        counters += range(first, last + 1)
    return counters


def planned_counters(plan: RunPlan, step: int) -> list[int]:
    """Return the counters of the samples that an optimizer step of a plan draws.

    Raises:
        TrainctlError: The plan ends earlier.
    """
    for stage in stages_of_plan(plan):
        if stage.first_step < step <= stage.end_step:
            return parse_counters(f"{stage.sample_of(step - 1)}-{stage.sample_of(step) - 1}")
    raise TrainctlError(f"the plan ends with step {plan.total_steps:,}", hint="an earlier step")


def counters_of_step(events: Iterable[Event], step: int) -> list[int]:
    """Return the sample counters of an optimizer step (from 1), from the run's records so far.

    Raises:
        TrainctlError: There is no record of the step (exit code 5), or it has more than
            `MOST_SAMPLES` samples.
    """
    record = step_curve(events).get(step)
    if record is None or not record.get("samples"):
        raise RunStateError(f"the run has no record of step {step:,}")
    first, end = record["samples"]
    if end - first > MOST_SAMPLES:
        raise TrainctlError(
            f"step {step:,} has {end - first:,} samples",
            hint=f"a part of them: --samples {first}-{first + MOST_SAMPLES - 1}",
        )
    return list(range(first, end))


def read_samples(
    plan: RunPlan,
    corpora: Mapping[str, Corpus],
    tokenizer: Tokenizer,
    counters: list[int],
    *,
    most_characters: int,
) -> list[Sample]:
    """Return the contents of the samples with these counters.

    The corpora's files must exist. Texts are cut to `most_characters`; 0 keeps them whole.
    """
    sections = sources_of(plan.config.data)
    try:
        tokens = {name: packed_token_count(plan.config, corpora[name]) for name in sections}
        order = sample_order(plan, tokens)
    except ValueError:  # there are no samples
        return []
    found = order.at(np.array(counters) // answers_per_prompt(plan.config.objective))
    lengths = np.array([stage.length for stage in order.stages])[found.stage]
    readers: dict[tuple[str, int], SampleReader] = {}
    texts: dict[str, TrainingText] = {}
    samples = []
    for number, counter in enumerate(counters):
        source, index = int(found.source[number]), int(found.index[number])
        name, length = order.names[source], int(lengths[number])
        corpus = corpora[name]
        if name not in texts:
            texts[name] = training_text(plan, corpus, name)
        if (name, length) not in readers:
            bins = load_bins(plan.config, corpus, corpus.train)
            infilling = infilling_settings(plan.config, name)
            readers[name, length] = SampleReader(
                corpus, corpus.train, length, bins=bins, infilling=infilling
            )
        reader, epoch = readers[name, length], int(found.epoch[number])
        text, is_cut, stretches, targets = _decode_sample(
            reader, index, epoch, tokenizer, most_characters, corpus
        )
        pieces = reader.pieces(index)
        passages = [each for span in pieces for each in _sample_passages(texts[name], *span)]
        samples.append(
            Sample(
                counter=counter,
                source=name,
                index=index,
                epoch=epoch,
                first_token=pieces[0][0],
                passages=tuple(passages),
                text=text,
                is_cut=is_cut,
                stretches=stretches,
                targets=targets,
            )
        )
    return samples


def _decode_sample(
    reader: SampleReader,
    index: int,
    epoch: int,
    tokenizer: Tokenizer,
    most_characters: int,
    corpus: Corpus,
) -> tuple[str, bool, tuple[ChatStretch, ...], tuple[float | str, ...]]:
    """Return a sample's text, whether it is cut, its stretches, and its targets."""
    batch = reader.read(np.array([index]), np.array([epoch]))
    size = sum(end - start for start, end in reader.pieces(index))
    ids, is_marked = batch.tokens[0, :size], corpus.is_marked
    text = (
        _decode_with_names(ids.tolist(), tokenizer) if is_marked else tokenizer.decode(ids.tolist())
    )
    cut = text[:most_characters] if most_characters else text
    stretches = _loss_mask_runs(ids, batch.ignored[0], tokenizer, len(cut)) if is_marked else ()
    targets = name_targets(batch.targets[0], corpus.classes)
    return cut, len(cut) < len(text), tuple(stretches), tuple(targets)


def common_document(batches: Sequence[Sequence[Sample]]) -> tuple[str, Passage] | None:
    """Return a document that every batch has tokens of, with its source; None if there is none.

    If there are several, it is the one with the most samples in the batches.
    """
    found: dict[tuple[str, int], tuple[set[int], Passage, int]] = {}
    for number, batch in enumerate(batches):
        for sample in batch:
            for passage in sample.passages:
                key = sample.source, passage.document
                within, _, times = found.get(key, (set(), passage, 0))
                found[key] = within | {number}, passage, times + 1
    everywhere = [
        (times, source, passage)
        for (source, _), (within, passage, times) in found.items()
        if len(within) == len(batches)
    ]
    if not everywhere:
        return None
    _, source, passage = max(everywhere, key=lambda each: each[0])
    return source, passage


def _loss_mask_runs(
    ids: npt.NDArray[np.int64],
    ignored: npt.NDArray[np.bool_],
    tokenizer: Tokenizer,
    most_characters: int,
) -> Iterator[ChatStretch]:
    """Yield a sample's text by runs of the loss mask. The first token is no label."""
    has_loss = np.concatenate([[False], ~ignored[: len(ids) - 1]])
    borders = np.flatnonzero(np.diff(has_loss)) + 1
    for first, end in pairwise([0, *borders.tolist(), len(ids)]):
        text = _decode_with_names(ids[first:end].tolist(), tokenizer)[:most_characters]
        most_characters -= len(text)
        if text:
            yield ChatStretch(text, bool(has_loss[first]))


def _decode_with_names(ids: list[int], tokenizer: Tokenizer) -> str:
    r"""Return the text of ids, with special tokens by name.

    A backslash stands before a name that is no token, but letters: `\<eos>`.
    """
    text = tokenizer.decode(ids, with_special=True)
    added = tokenizer.added_tokens() if isinstance(tokenizer, FileTokenizer) else {}
    if not added:
        return text
    names = re.compile("|".join(sorted(map(re.escape, added.values()), key=len, reverse=True)))
    are_tokens: list[bool] = []
    for is_added, run in groupby(ids, lambda token: token in added):
        numbers = list(run)
        found = numbers if is_added else names.findall(tokenizer.decode(numbers))
        are_tokens += [is_added] * len(found)
    if all(are_tokens) or len(are_tokens) != len(names.findall(text)):
        return text
    is_token = iter(are_tokens)
    return names.sub(lambda name: name[0] if next(is_token) else f"\\{name[0]}", text)


def training_text(plan: RunPlan, corpus: Corpus, source: str) -> TrainingText:
    """Return the training text of a source."""
    from_function = plan.config.data.factory is not None
    return TrainingText(corpus, None if from_function else sources_of(plan.config.data)[source])


class TrainingText:
    """Training text of a source: `tokens`, and the `ends` of documents.

    `config` is the source's section, None if a function gave the texts.
    """

    def __init__(self, corpus: Corpus, config: DataConfig | None) -> None:
        self.tokens = corpus.tokens(corpus.train)
        self.ends = corpus.ends(corpus.train)
        self._places: _StoredOrigins | _FilePlaces | None = None
        if corpus.train.origin:
            self._places = _StoredOrigins(corpus)
        elif config is not None:
            self._places = _FilePlaces(config)

    def place_of(self, document: int) -> tuple[str | None, int | None]:
        """Return file and line of a document; the file is None if unknown."""
        return self._places.find(document) if self._places else (None, None)


def _sample_passages(text: TrainingText, first: int, last: int) -> Iterator[Passage]:
    ends = text.ends
    number = bisect_right(ends, first)
    inside = [int(end) for end in ends[number : bisect_right(ends, last - 1)]]
    for document, (start, end) in enumerate(pairwise([first, *inside, last]), number):
        if start == end:  # an empty document
            continue
        begins = int(ends[document - 1]) if document else 0
        yield Passage(document, *text.place_of(document), start - begins, end - begins)


class _StoredOrigins:
    """Files and lines of documents, from the origins stored when the split was tokenized."""

    def __init__(self, corpus: Corpus) -> None:
        self._origin = corpus.origin(corpus.train)
        self._files: list[str] = json.loads((Path(corpus.folder) / FILES).read_bytes())

    def find(self, document: int) -> tuple[str | None, int | None]:
        """Return file and line of a document; the file is None if it does not exist any more."""
        assert self._origin is not None
        if document >= len(self._origin):
            return None, None
        file, line = self._origin[document].tolist()
        path = self._files[file]
        return (path, line or None) if is_url(path) or Path(path).is_file() else (None, None)


class _FilePlaces:
    """Files and lines of documents of a corpus without origins, from the files as they are now."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self._places: list[tuple[File, int | None]] | None = None
        try:
            self._files = split_files(config)
        except TrainctlError:  # the files are gone, but not the tokens
            self._files = TextFiles([], [])

    def find(self, document: int) -> tuple[str | None, int | None]:
        """Return file and line of a document, None if there is no such document."""
        if self._places is None:
            self._places = self._all_places()
        if document >= len(self._places):
            return None, None
        file, line = self._places[document]
        return str(file), line

    def _all_places(self) -> list[tuple[File, int | None]]:
        places = spec_of(self._config).places
        is_divided = self._files.by_document or self._config.on_bad_text is OnBadText.skip
        if places is None or is_divided:
            return self._read_places()
        found: list[tuple[File, int | None]] = []
        for file in self._files.train:
            with suppress(OSError, TrainctlError):  # the file is gone or has changed
                found += [(file, line) for line in places(file)]
        return found

    def _read_places(self) -> list[tuple[File, int | None]]:
        """Return the places by reading all text, as needed if some lines were not trained on."""
        try:
            found = split_documents(self._config, self._files, Reader(self._config))
            return [(document.file, document.line) for split, document in found if split == "train"]
        except TrainctlError:  # the text has changed
            return []
