"""Distillation: the divergence from a teacher, and the pass of the teacher before the first step.

The teacher's distribution at a position is stored as k log-probabilities and one of all other
tokens together (`trainctl.data.teacher_store`). The student's is taken on the same k + 1 outcomes,
so the divergence is between two whole distributions. It is a lower bound of the divergence over the
vocabulary (merging outcomes never increases one), and equal to it if k is the vocabulary's size.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.model_directory import fill_from_directory
from trainctl.config.registry import new_section
from trainctl.data.cache_files import cache_folder
from trainctl.data.corpora import Corpora
from trainctl.data.teacher_store import TeacherStore, config_of_teacher, stored_teachers
from trainctl.engines.micro_batch import IGNORED_LABEL
from trainctl.engines.process import Process
from trainctl.errors import MachineError, RunStateError, TrainctlError
from trainctl.models.local_path import local_path
from trainctl.models.tensors import stored_tensors
from trainctl.options.objective.distill import (
    CHUNK_POSITIONS,
    TEACHER,
    DistillConfig,
    DivergenceKind,
)
from trainctl.plans.settings import number_formats
from trainctl.plans.types import RunPlan
from trainctl.readers.files import digest_of
from trainctl.runs.files import write_json
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import identity_digest
from trainctl.train.checkpoint.content import find_weights_checkpoint
from trainctl.train.data import PackedDataset, TrainingData
from trainctl.train.evaluation import inference
from trainctl.train.models.frozen_base import FullModel, base_file, file_digests, whole_weights
from trainctl.train.models.model import (
    TORCH_TYPES,
    materialise,
    skeleton,
    with_portable_attention,
)
from trainctl.train.models.weights import SafetensorsWeights, WeightSource
from trainctl.train.objectives.base import Measured, SeenLogits
from trainctl.train.parallel.tensor import Vocabulary

_LEAST = -1e4
"""Log-probability in place of minus infinity, of tokens that the teacher has no row for."""


def distill(config: DistillConfig, seen: SeenLogits) -> Measured:
    """Return the loss of each position: (1 - w) divergence + w cross entropy of the label.

    With a temperature, both distributions are softmaxes of the logits divided by it. The divergence
    is not multiplied by its square.
    """
    stored = seen.beside.stored[TEACHER]
    k = stored.shape[-1] // 2
    ids, values = stored[..., :k].long(), stored[..., k:].contiguous().view(torch.float32)
    # Rounding to fp16 leaves a sum of 1 within a thousandth: the softmax makes it exact.
    teacher = values.log_softmax(dim=-1).clamp(min=_LEAST)
    student = outcome_log_probabilities(seen.logits, ids, seen.vocabulary, config.temperature)
    size = seen.logits.shape[-1] if seen.vocabulary is None else seen.vocabulary.size
    if k == size:  # there is no other token
        teacher, student = teacher[..., :k], student[..., :k]
    labels = seen.labels.clamp(min=0)[..., None]
    with torch.set_grad_enabled(torch.is_grad_enabled() and config.label_weight > 0):
        cross_entropy = -outcome_log_probabilities(seen.logits, labels, seen.vocabulary)[..., 0]
    found = divergence(config, teacher, student)
    losses = torch.lerp(found, cross_entropy, config.label_weight)
    return losses, {"divergence": found, "cross_entropy": cross_entropy}


def divergence(config: DistillConfig, teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """Return the divergence of two distributions, given as log-probabilities, (..., outcomes).

    The generalized Jensen-Shannon divergence is equation 1 of arXiv:2306.13649: beta KL(p || m) +
    (1 - beta) KL(q || m) with the mixture m = beta p + (1 - beta) q.
    """
    match config.divergence:
        case DivergenceKind.forward_kl:
            return _kl(teacher, student)
        case DivergenceKind.reverse_kl:
            return _kl(student, teacher)
        case DivergenceKind.jsd:
            beta = teacher.new_tensor(config.beta)
            mixture = torch.logaddexp(teacher + beta.log(), student + torch.log1p(-beta))
            return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum(dim=-1)


def outcome_log_probabilities(
    logits: torch.Tensor,
    ids: torch.Tensor,
    vocabulary: Vocabulary | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Return the log-probabilities of some tokens and of all others together, (..., k + 1), fp32.

    The last one is minus infinity if `ids` are the whole vocabulary. Computed and differentiated in
    chunks of positions, so only the logits and their gradient have the vocabulary's size.

    Args:
        logits: (samples, length, vocabulary), or this tensor rank's part of the vocabulary.
        ids: Different token ids, (samples, length, k).
        vocabulary: Split of the vocabulary over tensor ranks; None if it is whole.
    """
    return _Outcomes.apply(logits, ids, vocabulary, temperature)


class _Outcomes(torch.autograd.Function):
    """Log-softmax at some ids and at the rest as one outcome, with a softmax over all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        ids: torch.Tensor,
        vocabulary: Vocabulary | None,
        temperature: float,
    ) -> torch.Tensor:
        ctx.how = vocabulary, temperature
        shape, width = ids.shape, logits.shape[-1]
        flat, ids = logits.reshape(-1, width), ids.reshape(-1, shape[-1])
        found, sums = [], []
        for scores, chosen in _chunks(flat, ids):
            own = _Part(scores, chosen, vocabulary, temperature)
            total, rest = own.log_sum(own.scores), own.log_sum(own.others)
            found.append(torch.cat([own.picked(), rest], dim=-1) - total)
            sums.append(torch.cat([total, rest], dim=-1))
        ctx.save_for_backward(flat, ids, torch.cat(sums))
        return torch.cat(found).view(*shape[:-1], shape[-1] + 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        flat, ids, sums = ctx.saved_tensors
        vocabulary, temperature = ctx.how
        result, of_all = torch.empty_like(flat), gradient.reshape(-1, gradient.shape[-1])
        for scores, chosen, given, kept, found in _chunks(flat, ids, of_all, sums, result):
            own = _Part(scores, chosen, vocabulary, temperature)
            of_ids, of_rest = given.split([chosen.shape[-1], 1], dim=-1)
            total, rest = kept.split(1, dim=-1)
            slope = (own.scores - total).exp_() * -(of_ids.sum(dim=-1, keepdim=True) + of_rest)
            # Without other tokens `rest` is minus infinity, and there is nothing to add.
            slope += (own.others - rest.clamp(min=-1e30)).exp_() * of_rest
            own.add(slope, of_ids)
            found.copy_(slope / temperature)
        return result.view(*gradient.shape[:-1], -1), None, None, None


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    yield from zip(*(each.split(CHUNK_POSITIONS) for each in tensors), strict=True)


class _Part:
    """Scores of some positions for this tensor rank's tokens, and where the chosen ids are there.

    Attributes:
        scores: Logits over the temperature, fp32, (positions, tokens of this rank).
    """

    def __init__(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor,
        vocabulary: Vocabulary | None,
        temperature: float,
    ) -> None:
        self.scores = logits.float() / temperature
        width = logits.shape[-1]
        first = 0 if vocabulary is None else vocabulary.first
        local = ids - first
        self._is_other = (local < 0) | (local >= width)
        self._places = local.masked_fill(self._is_other, width)  # one more column, which is cut off
        self._group = None if vocabulary is None else vocabulary.axis.group

    @property
    def others(self) -> torch.Tensor:
        """Scores, with minus infinity at the chosen ids."""
        return F.pad(self.scores, (0, 1)).scatter_(-1, self._places, -torch.inf)[:, :-1]

    def picked(self) -> torch.Tensor:
        """Return the scores of the chosen ids, on all ranks."""
        found = self.scores.gather(-1, self._places.masked_fill(self._is_other, 0))
        found = found.masked_fill(self._is_other, 0.0)
        if self._group is not None:
            dist.all_reduce(found, group=self._group)
        return found

    def log_sum(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the log of the sum of exponentials over all ranks' tokens, (positions, 1)."""
        own = scores.logsumexp(dim=-1, keepdim=True)
        if self._group is None:
            return own
        largest = own.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        largest = largest.clamp(min=-1e30)  # minus infinity less itself is not a number
        total = (own - largest).exp_()
        dist.all_reduce(total, group=self._group)
        return total.log_() + largest

    def add(self, slope: torch.Tensor, of_ids: torch.Tensor) -> None:
        """Add the gradients of the chosen ids to that of the scores, in place."""
        places = self._places.masked_fill(self._is_other, 0)
        slope.scatter_add_(-1, places, of_ids.masked_fill(self._is_other, 0.0))


@dataclass(frozen=True, slots=True)
class Side:
    """The samples of one length in one split of a source."""

    split: str
    """`train` or `held_out`."""
    corpus: str
    """Digest of the source's corpus."""
    dataset: PackedDataset


def sides_of(
    corpora: Corpora,
    held_out: Mapping[str, PackedDataset],
    training: TrainingData | None = None,
) -> list[Side]:
    """Return all samples of a run, without those of training if they are not given."""
    datasets = [("held_out", name, each) for name, each in held_out.items()]
    if training is not None:
        datasets += [("train", name, each) for (name, _), each in training.datasets.items()]
    return [
        Side(split, corpora[name].digest, dataset)
        for split, name, dataset in datasets
        if dataset.num_samples
    ]


def attach_teacher(
    plan: RunPlan,
    run: RunPaths,
    process: Process,
    sides: Sequence[Side],
    tell: Callable[[str], None],
) -> None:
    """Attach the teacher's stored log-probabilities to the samples; compute what is missing.

    All ranks call this together, before the student is built: each computes whole shares of the
    samples with the whole teacher, which is freed then. A run keeps the digest of its teacher.

    Args:
        tell: Receives the progress.

    Raises:
        TrainctlError: There is no teacher, or it has changed since the run started (exit code 5),
            or the store cannot be written.
    """
    config = plan.config.objective
    if not isinstance(config, DistillConfig):
        return
    sha256 = process.broadcast_from_first(_recorded_digest(run) if process.is_first else None)
    if sha256 is None and config.teacher is not None:
        sha256 = _Teacher(config.teacher, process).digest(_base(config))
    elif sha256 is None:
        sha256 = _only_teacher(plan, sides)
    stores = [_store_of(plan, side, sha256) for side in sides]
    tasks = [(place, share) for place, store in enumerate(stores) for share in store.missing()]
    tasks = process.broadcast_from_first(tasks)
    if tasks:
        _compute(plan, process, [*zip(sides, stores, strict=True)], tasks, sha256, tell)
        process.barrier()
        tell("building the model and its engine")
        gc.collect()  # the teacher, before the student is built
        if process.device.type == "cuda":
            torch.cuda.empty_cache()
    if process.any(any(store.missing() for store in stores)):
        raise MachineError(
            f"not every machine sees the teacher's log-probabilities in {_base(config)}",
            hint="objective.teacher_log_probabilities=DIR, on a file system of all machines",
        )
    if process.is_first and stores:
        folders = [str(store.folder) for store in stores]
        write_json(run.teacher, {"sha256": sha256, "folders": folders})
    for side, store in zip(sides, stores, strict=True):
        side.dataset.stored[TEACHER] = store


def attach_saved_teacher(plan: RunPlan, run: RunPaths, sides: Sequence[Side]) -> None:
    """Attach a run's stored log-probabilities of its teacher to samples, outside training.

    Raises:
        TrainctlError: They are not there (exit code 5).
    """
    sha256 = _recorded_digest(run) or _only_teacher(plan, sides)
    for side in sides:
        store = _store_of(plan, side, sha256)
        if store.missing():
            raise RunStateError(
                f"the teacher's log-probabilities of these samples are not in {store.folder}",
                hint="resume the run, which computes them; or "
                "objective.teacher_log_probabilities=DIR in a new run",
            )
        side.dataset.stored[TEACHER] = store


def _section(plan: RunPlan) -> DistillConfig:
    section = plan.config.objective
    assert isinstance(section, DistillConfig)
    return section


def _base(config: DistillConfig) -> Path:
    """Return the folder of a run's stores."""
    kept = config.teacher_log_probabilities
    return local_path(kept) if kept else cache_folder()


def _store_of(plan: RunPlan, side: Side, sha256: str | None) -> TeacherStore:
    return TeacherStore(_base(_section(plan)), _identity(plan, side) | {"teacher": sha256})


def _identity(plan: RunPlan, side: Side) -> dict[str, Any]:
    """Return what the values of a store depend on, but for the teacher."""
    config, objective = plan.config, _section(plan)
    return {
        "weights": number_formats(config.precision).weights.value,
        "corpus": side.corpus,
        "split": side.split,
        "packing": config.data.packing.value,
        "on_too_long": config.data.on_too_long.value,
        "mask_documents": config.data.mask_documents,
        "samples": side.dataset.num_samples,
        "length": side.dataset.sequence_length,
        "vocab_size": config.model.vocab_size,
        "top_k": objective.top_k,
        "temperature": objective.temperature,
        "values": objective.store_as.value,
    }


def _only_teacher(plan: RunPlan, sides: Sequence[Side]) -> str | None:
    """Return the teacher whose stores of all samples are whole; None if there is none.

    Raises:
        TrainctlError: There are several; names them (exit code 4).
    """
    base = _base(_section(plan))
    of_sides = [stored_teachers(base, _identity(plan, side)) for side in sides]
    common = sorted(set.intersection(*map(set, of_sides))) if of_sides else []
    if len(common) > 1:
        names = ", ".join(f"{each[:12]} ({of_sides[0][each].name})" for each in common)
        raise MachineError(
            f"{base} has log-probabilities of these samples from {len(common)} teachers: {names}",
            hint="objective.teacher=DIR says which one; or keep each teacher's in a folder of "
            "its own, and name it in objective.teacher_log_probabilities",
        )
    return common[0] if common else None


def _recorded_digest(run: RunPaths) -> str | None:
    """Return the digest of the teacher that the run started with; None before the first start."""
    try:
        found: Any = json.loads(run.teacher.read_bytes())["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _compute(
    plan: RunPlan,
    process: Process,
    pairs: Sequence[tuple[Side, TeacherStore]],
    tasks: Sequence[tuple[int, int]],
    sha256: str | None,
    tell: Callable[[str], None],
) -> None:
    """Compute and store the missing shares, each rank its own.

    Args:
        tasks: Indices in `pairs`, each with the number of a share.
    """
    config = _section(plan)
    if config.teacher is None:
        raise MachineError(
            f"{_base(config)} does not have a teacher's log-probabilities of these samples "
            f"({len(tasks):,} shares are missing): corpus, sequence length, packing, "
            "mask_documents, precision, top_k, temperature and store_as must be the same",
            hint="objective.teacher=DIR computes them",
        )
    teacher = _Teacher(config.teacher, process)
    if sha256 != teacher.digest(_base(config)):
        raise RunStateError(
            f"objective.teacher={config.teacher} is not the teacher any more that this run started "
            "with, and a part of its log-probabilities is gone",
            hint="put the teacher back as it was, or start a new run",
        )
    if process.is_first:
        for _, store in pairs:
            store.begin()
    process.barrier()
    own, device = tasks[process.rank :: process.world_size], process.device
    model = teacher.load(plan, device)
    with inference(model):
        for done, (place, share) in enumerate(own):
            tell(f"teacher: share {done + 1:,} of {len(own):,}")
            _write_share(plan, model, *pairs[place], share, device)


def _write_share(
    plan: RunPlan,
    model: PreTrainedModel,
    side: Side,
    store: TeacherStore,
    share: int,
    device: torch.device,
) -> None:
    """Compute the rows of a share's samples, and write them."""
    config, vocabulary = _section(plan), plan.config.model.vocab_size
    size = plan.batch.micro_batch_size
    samples, found = store.samples(share), []
    for start in range(samples.start, samples.stop, size):
        batch = side.dataset.micro_batch(np.arange(start, min(start + size, samples.stop)))
        is_counted = batch.labels != IGNORED_LABEL
        logits = model(**batch.model_inputs(device)).logits[..., :vocabulary]
        for own, scores in zip(is_counted, logits, strict=True):
            rows = store.rows(int(own.sum()))
            rows["place"] = own.nonzero()[:, 0].numpy()
            _fill_rows(rows, scores[own.to(device)], config)
            found.append(rows)
    store.write(share, found)


def _fill_rows(rows: npt.NDArray[Any], scores: torch.Tensor, config: DistillConfig) -> None:
    """Write the most probable tokens of each position into its row; scores (positions, tokens)."""
    for start in range(0, len(rows), CHUNK_POSITIONS):
        here = slice(start, start + CHUNK_POSITIONS)
        logs = (scores[here].float() / config.temperature).log_softmax(dim=-1)
        # A student's table may be padded to more rows than the teacher has.
        logs = F.pad(logs, (0, max(0, config.top_k - logs.shape[-1])), value=-torch.inf)
        top = logs.topk(config.top_k, dim=-1)
        rest = logs.scatter_(-1, top.indices, -torch.inf).logsumexp(dim=-1)
        rows["ids"][here] = top.indices.cpu().numpy()
        rows["log_probabilities"][here] = top.values.cpu().numpy()
        rows["tail"][here] = rest.cpu().numpy()


class _Teacher:
    """A teacher's files: a transformers directory, a run, or a checkpoint.

    Args:
        process: This rank; all ranks call the methods together.
    """

    def __init__(self, path: str, process: Process) -> None:
        self._path, self._process = local_path(path), process
        with self._naming_key():
            self._checkpoint = find_weights_checkpoint(self._path, process)

    @contextmanager
    def _naming_key(self) -> Iterator[None]:
        """Name `objective.teacher` in errors of functions that read a run's initial weights."""
        try:
            yield
        except TrainctlError as error:
            raise TrainctlError(
                error.message.replace("model.initial_weights", "objective.teacher"),
                hint=error.hint.replace("model.initial_weights", "objective.teacher"),
                exit_code=error.exit_code,
            ) from None

    def digest(self, base: Path) -> str:
        """Return the SHA-256 of the teacher's weights and shape.

        Args:
            base: Folder for a cache of the digests of large files.
        """
        if self._checkpoint is not None:
            return identity_digest(self._checkpoint.manifest)
        with self._naming_key():
            names = {tensor.file for tensor in stored_tensors(self._path).values()}
        place = digest_of(str(self._path.resolve()))[:24]
        if self._process.is_first:
            with suppress(OSError):  # a store that is whole is only read
                base.mkdir(parents=True, exist_ok=True)
        kept = base / f"teacher-files-{place}.json"
        found = file_digests(self._path, sorted({"config.json", *names}), kept, self._process)
        return digest_of(str(found))

    def load(self, plan: RunPlan, device: torch.device) -> PreTrainedModel:
        """Return the teacher on the device, in the run's weight format."""
        dtype = TORCH_TYPES[number_formats(plan.config.precision).weights]
        with self._naming_key():
            run = config_of_teacher(self._path)
            if run is not None:
                shape = run.model
            else:
                shape = fill_from_directory(new_section("model", "hf", path=str(self._path)))
            shape = with_portable_attention(shape)
            model = skeleton(shape, dtype)
            source: WeightSource
            if self._checkpoint is None:
                source = SafetensorsWeights(self._path, model)
            else:
                kept = base_file(self._checkpoint.path)
                whole = FullModel.of(shape, model)
                source = whole_weights(self._checkpoint, whole, kept=kept, process=self._process)
            materialise(model, source, device)
        return model
