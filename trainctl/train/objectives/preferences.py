"""Preference objectives: their loss functions, as in the papers, and the reference of DPO and KTO.

The reference is two log-probabilities per record, under the weights before the first step: of both
answers of a pair, or of a single answer and of the other one after the same prompt. The run's own
engine computes them once, on the layout that it has, so no second model is in memory. They are kept
in `reference.npz` of the run, which every later attempt reads.
"""

from __future__ import annotations

import io
import json
import time
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from trainctl.data.corpora import Corpora, corpus_digests
from trainctl.errors import RunStateError
from trainctl.options.objective import ANSWERS, REFERENCE, objective_of
from trainctl.options.objective.dpo import DpoConfig, PreferenceLoss
from trainctl.options.objective.kto import KtoConfig
from trainctl.options.objective.orpo import OrpoConfig
from trainctl.options.objective.simpo import SimpoConfig
from trainctl.plans.mixture import SINGLE_SOURCE
from trainctl.runs.files import write_bytes
from trainctl.runs.layout import RunPaths
from trainctl.train.data import PackedDataset
from trainctl.train.evaluation import inference
from trainctl.train.objectives.base import Measured, SeenPairs, SeenTokens, WholeBatch
from trainctl.train.session import Session


def dpo(config: DpoConfig, pairs: SeenPairs) -> Measured:
    """Return the DPO loss, -log sigmoid(margin), equation 7 of arXiv:2305.18290.

    With label smoothing, it is the weighted mean of the losses of both orders. The margin is
    the difference of the rewards: beta times the log-ratio of policy to reference. IPO
    (arXiv:2310.12036, equation 17) uses means over the tokens, as its authors do.
    """
    chosen = pairs.chosen - pairs.reference_chosen
    rejected = pairs.rejected - pairs.reference_rejected
    margin = config.beta * (chosen - rejected)
    match config.loss:
        case PreferenceLoss.sigmoid:
            wrong = config.label_smoothing
            losses = -(1 - wrong) * F.logsigmoid(margin) - wrong * F.logsigmoid(-margin)
        case PreferenceLoss.hinge:
            losses = F.relu(1 - margin)
        case PreferenceLoss.ipo:
            means = chosen / pairs.chosen_tokens - rejected / pairs.rejected_tokens
            losses = (means - 1 / (2 * config.beta)).square()
    return losses, rewards(config.beta * chosen, config.beta * rejected)


def simpo(config: SimpoConfig, pairs: SeenPairs) -> Measured:
    """Return the SimPO loss, -log sigmoid(margin - gamma), equation 6 of arXiv:2405.14734."""
    chosen = config.beta * pairs.chosen / pairs.chosen_tokens
    rejected = config.beta * pairs.rejected / pairs.rejected_tokens
    losses = -F.logsigmoid(chosen - rejected - config.gamma_ratio * config.beta)
    return losses, rewards(chosen, rejected)


def orpo(config: OrpoConfig, pairs: SeenPairs) -> Measured:
    """Return the ORPO loss, equation 6 of arXiv:2403.07691.

    It is the chosen answer's mean loss, minus `weight` times log sigmoid(log odds ratio). The
    odds of an answer are p / (1 - p), where log p is its mean log-probability.
    """
    chosen = pairs.chosen / pairs.chosen_tokens
    rejected = pairs.rejected / pairs.rejected_tokens
    odds = (chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected))
    losses = -chosen - config.weight * F.logsigmoid(odds)
    measures = rewards(config.weight * chosen, config.weight * rejected)
    return losses, {**measures, "chosen_loss": -chosen}


def log_ratios(config: KtoConfig, seen: SeenTokens) -> torch.Tensor:
    """Return features of answers, (samples, 3): the log-ratio of policy to reference of the answer,
    that of another record's answer to the same prompt, and whether the answer is good.

    Without a stored reference they are the log-probabilities, which become it.
    """
    answers = SeenPairs.of(seen)
    assert seen.beside is not None and seen.beside.targets is not None
    own = answers.chosen - answers.reference_chosen
    other = answers.rejected - answers.reference_rejected
    return torch.stack([own, other, seen.beside.targets[:, 0].nan_to_num(0.0)], dim=1)


def kto(config: KtoConfig, batch: WholeBatch) -> Measured:
    """Return the KTO loss, lambda_y - v(x, y) of equation 8 in arXiv:2402.01306.

    The baseline is the mean log-ratio of mismatched answers over the global batch, at least 0. It
    has no gradient.
    """
    own, other, label = batch.features.unbind(dim=1)
    other = torch.where(batch.is_counted, other.detach(), 0.0)
    baseline = (other.sum() / batch.is_counted.sum().clamp(min=1)).clamp(min=0)
    is_good = label > 0.5
    above = config.beta * (own - baseline)
    losses = torch.where(
        is_good,
        config.desirable_weight * torch.sigmoid(-above),
        config.undesirable_weight * torch.sigmoid(above),
    )
    reward = config.beta * own
    return losses, {
        "desirable": is_good.float(),
        "reward_desirable": torch.where(is_good, reward, 0.0),
        "reward_undesirable": torch.where(is_good, 0.0, reward),
        "kl": baseline.expand(len(own)),
    }


def rewards(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the measures of `trainctl.options.objective.REWARDS`, (samples,) each."""
    return {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "margin": chosen - rejected,
        "accuracy": (chosen > rejected).float(),
    }


def _log_of_rest(log_probability: torch.Tensor) -> torch.Tensor:
    """Return log(1 - p), precise for p near 0 and near 1.

    p = 1 gives a finite value; its exact logarithm would have no gradient.
    """
    return torch.log(-torch.expm1(log_probability.clamp(max=-1e-12)))


Reference = dict[str, npt.NDArray[np.float32]]
"""Log-probabilities of chosen and rejected answers, (samples, 2), by side of the corpus: `train`
and `held_out`.
"""

FORMAT = 1


def attach_reference(session: Session, tell: Callable[[str], None]) -> dict[str, Any] | None:
    """Attach the reference log-probabilities to the run's datasets; all ranks call this together.

    Returns:
        Entries for the run's record; None if the objective needs no reference.

    Raises:
        TrainctlError: The run has made steps, and its reference is gone or of other pairs (exit
            code 5).
    """
    if REFERENCE not in objective_of(session.plan.config.objective).stored:
        return None
    started = time.monotonic()
    (training,) = session.training.datasets.values()  # pairs have one source and one length
    sides = {"train": training, "held_out": session.held_out[SINGLE_SOURCE]}
    counts = {side: dataset.num_samples for side, dataset in sides.items()}
    run, process = session.run, session.process
    known: Reference | None = None
    if session.progress.step:  # at step 0 the weights may differ from an earlier start's
        known = read_reference(run, session.corpora, counts) if process.is_first else None
        known = process.broadcast_from_first(known)
    if known is None:
        if session.progress.step:
            raise RunStateError(
                f"{run.reference.name} is not there any more, or of other pairs: it has what the "
                "weights before the first step said, and the run has made "
                f"{session.progress.step:,} steps",
                hint="restore the file, or start a new run: model.initial_weights=RUN",
            )
        known = {
            side: _compute_reference(session, dataset, tell) for side, dataset in sides.items()
        }
        if process.is_first:
            write_reference(run, known, reference_identity(session.corpora, counts))
        process.barrier()
    for side, dataset in sides.items():
        dataset.stored[REFERENCE] = known[side]
    return {**counts, "seconds": round(time.monotonic() - started, 3)}


def read_reference(run: RunPaths, corpora: Corpora, counts: dict[str, int]) -> Reference | None:
    """Return the reference that a run keeps; None if missing, damaged or of other pairs.

    Args:
        counts: Number of pairs by side; other sides are not read.
    """
    try:
        with np.load(io.BytesIO(run.reference.read_bytes()), allow_pickle=False) as arrays:
            of, samples = str(arrays["of"]), json.loads(str(arrays["of"]))["samples"]
            found = {side: arrays[side] for side in counts}
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
    is_same = of == reference_identity(corpora, samples) and counts.items() <= samples.items()
    return found if is_same else None


def write_reference(run: RunPaths, reference: Reference, of: str) -> None:
    """Write a reference to the run's folder, all of it or nothing."""
    stream = io.BytesIO()
    np.savez(stream, of=np.array(of), **reference)  # type: ignore[arg-type]
    write_bytes(run.reference, stream.getvalue())


def attach_saved_reference(
    run: RunPaths, corpora: Corpora, held_out: dict[str, PackedDataset]
) -> None:
    """Attach a run's reference to its held-out pairs, outside training.

    Args:
        held_out: Held-out datasets; pairs have the source `SINGLE_SOURCE` alone.

    Raises:
        TrainctlError: The run has no reference, or one of other pairs (exit code 5).
    """
    dataset = held_out[SINGLE_SOURCE]
    known = read_reference(run, corpora, {"held_out": dataset.num_samples})
    if known is None:
        raise RunStateError(
            f"{run.root} has no {run.reference.name} of these pairs",
            hint="it is written before the first step",
        )
    dataset.stored[REFERENCE] = known["held_out"]


def reference_identity(corpora: Corpora, counts: dict[str, int]) -> str:
    """Return the identity of a reference's pairs, as JSON. The weights are always the run's own."""
    return json.dumps(
        {"format": FORMAT, "samples": counts, **corpus_digests(corpora)}, sort_keys=True
    )


def _compute_reference(
    session: Session, dataset: PackedDataset, tell: Callable[[str], None]
) -> npt.NDArray[np.float32]:
    """Compute the reference of a dataset, (pairs, 2); all ranks call this together.

    Each data-parallel rank computes a share of the pairs, all in the same number of passes.
    """
    engine, mesh, count = session.engine, session.mesh, dataset.num_samples
    size, rank, ranks = session.plan.batch.micro_batch_size, mesh.data.index, mesh.data.size
    places, own = [], []
    with inference(engine.module):
        for start in range(0, count, size * ranks):
            tell(f"reference: {start:,} of {count:,} pairs")
            indices = np.arange(start + rank * size, start + (rank + 1) * size)
            features = engine.output(dataset.micro_batch(np.where(indices < count, indices, -1)))
            places.append(indices)
            of_pairs = engine.measured()[:, -len(ANSWERS) :]
            found = features[:, : len(ANSWERS)] if engine.objective.passes == 2 else of_pairs
            own.append(found.float().cpu())
    share = (np.concatenate(places), torch.cat(own).numpy()) if own else None
    reference = np.zeros((count, len(ANSWERS)), np.float32)
    for each in session.process.gather(share if mesh.tensor.is_first else None):
        if each is not None:
            indices, values = each
            reference[indices[indices < count]] = values[indices < count]
    return reference
