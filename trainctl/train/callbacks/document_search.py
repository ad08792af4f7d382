"""Search for the documents that carry a spike: halves of a batch are left out, again and again.

A document is left out by its labels: the batch keeps its shape, so every layout can do it. Of what
is left, the sum of the losses (or its gradient) is divided by the labels of the whole batch, so
that the parts of a batch add up to its loss (or gradient).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainctl.engines.micro_batch import IGNORED_LABEL, MicroBatch
from trainctl.errors import TrainctlError
from trainctl.options.callbacks import Callback, Context
from trainctl.options.data import SampleKind, spec_of
from trainctl.runs.files import write_json
from trainctl.runs.replays import SearchSettings
from trainctl.train.callbacks.trial import RepeatedStep
from trainctl.train.session import Session

Indices = npt.NDArray[np.int64]
Excess = Callable[[Indices], float]
"""Excess of a part of the batch over the usual value; infinite if it is not finite."""

LEAST_SHARE = 0.05
"""Least share of the spike that a document among several carries."""
EXCERPT = 400
"""Characters of a document that are shown."""


@dataclass(slots=True)
class CarrierSearch:
    """Result of a search among units, which are numbered."""

    found: list[tuple[int, float]] = field(default_factory=list)
    """Units that carry the spike, each with the excess that is gone without it."""
    left: float = 0.0
    """Excess without the units that were found."""
    narrowest: Indices = field(default_factory=lambda: np.zeros(0, np.int64))
    """Smallest part that was measured and carries more than half of the spike."""


def search_carriers(excess: Excess, units: Indices, whole: float, most: int) -> CarrierSearch:
    """Find the units that carry a spike, each by bisection: the half that has more of the excess.

    A unit is found if leaving it out ends the spike, or takes a share of it, or if it alone carries
    the spike. Of n units one takes log2(n) + 1 measurements.

    Args:
        whole: Excess of all units together.
        most: Maximum number of units to find.
    """
    search = CarrierSearch(left=whole, narrowest=units)
    least = max(LEAST_SHARE, 4 / max(1, len(units))) * whole

    def carries(part: float, of: float) -> bool:
        return part > of / 2 or part == math.inf

    while len(units) and len(search.found) < most and carries(search.left, whole):
        group, before = units, search.left
        of_group = before
        while len(group) > 1:
            half, rest = np.array_split(group, 2)
            of_half = excess(half)
            if carries(of_half, before) and len(half) < len(search.narrowest):
                search.narrowest = half
            if carries(of_half, of_group):
                group, of_group = half, of_half
            else:  # the least that the rest has, where a half has less than is usual
                group, of_group = rest, of_group - max(0.0, of_half)
        units = units[units != group[0]]
        after = excess(units) if len(units) else 0.0
        gone = before - after if after < math.inf else 0.0
        if carries(after, before) and gone < least and not carries(excess(group), before):
            break
        search.found.append((int(group[0]), gone))
        search.left = after
    return search


class DocumentSearch(Callback):
    """Searches the batch of the step after the last one, at the end of a replay.

    The first rank writes `found.json`.

    Args:
        settings: The spike, and how many documents to name.
    """

    def __init__(self, session: Session, settings: SearchSettings) -> None:
        self._session, self._settings = session, settings
        self._replays = 0

    def on_train_end(self, context: Context) -> None:
        session, settings = self._session, self._settings
        if settings.by == "grad_norm" and not session.gradients.are_visible:
            raise TrainctlError(
                "the trainer sees no gradients on this layout (TC069)", hint="--by loss"
            )
        units = _Units(session)

        def excess(part: Indices) -> float:
            context.beat("replaying a part of the batch")
            self._replays += 1
            return self._excess(units, part)

        whole = excess(units.all)
        least = math.inf if settings.least is None else settings.least
        is_there = whole >= least and whole > 0
        search = (
            search_carriers(excess, units.all, whole, settings.most)
            if is_there
            else CarrierSearch()
        )
        documents = [
            {**units.describe(unit), "share": min(1.0, gone / whole) if whole < math.inf else None}
            for unit, gone in search.found
        ]
        found = {
            "value": str(settings.usual + whole),
            "left": str(settings.usual + (search.left if is_there else whole)),
            "is_there": is_there,
            "replays": self._replays,
            "units": len(units.all),
            "documents": documents,
            "narrowest": [units.sample_of(int(n)) for n in search.narrowest[[0, -1]]]
            if is_there
            else [],
            "narrowest_units": len(search.narrowest),
        }
        if session.process.is_first:
            write_json(session.run.recording / "found.json", found)

    def _excess(self, units: _Units, part: Indices) -> float:
        """Return how much a part of the batch adds to the quantity's usual value."""
        measured = units.measure(part)
        whole, settings = float(units.labels.sum()), self._settings
        if settings.by == "grad_norm":
            assert measured.grad_norm is not None
            found = measured.grad_norm * measured.num_labels / whole - settings.usual
        else:
            usual = settings.usual * float(units.labels[part].sum())
            found = (measured.loss * measured.num_labels - usual) / whole
        return found if math.isfinite(found) else math.inf


class _Units:
    """Documents of a step's samples (of records the samples), numbered by sample and place.

    Attributes:
        labels: Number of labels of each unit, the same on all ranks; 1 where records are counted.
        all: Units with labels: padding has none.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._step = session, RepeatedStep(session)
        first, batch = self._step.first_sample, self._step.batch
        self._batches = session.training.step(first, batch)
        self._counters = session.training.counters(first, batch)
        # Documents of a record belong together.
        self._is_text = spec_of(session.plan.config.data).gives is SampleKind.text
        self._documents = [
            each.document_ids if self._is_text else torch.zeros_like(each.document_ids)
            for each in self._batches
        ]
        own: dict[int, list[int]] = {}
        for each, counters, documents in zip(
            self._batches, self._counters.tolist(), self._documents, strict=True
        ):
            has_label = each.labels != IGNORED_LABEL
            for row, counter in enumerate(counters):
                ids = documents[row]
                counts = torch.bincount(ids[has_label[row]], minlength=int(ids.max()) + 1)
                if each.counts_records:
                    counts = counts.clamp(max=1)
                own[counter] = counts.tolist()
        samples: dict[int, list[int]] = {}
        for found in session.process.gather(own):
            samples |= found
        self._samples = dict(sorted(samples.items()))
        sizes = [len(labels) for labels in self._samples.values()]
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self._first = dict(zip(self._samples, starts.tolist(), strict=True))
        self.labels = np.concatenate([np.array(each) for each in self._samples.values()])
        self.all: Indices = np.flatnonzero(self.labels)

    def measure(self, part: Indices) -> Any:
        """Return loss and gradient of some units, without the others."""
        kept = torch.zeros(len(self.labels), dtype=torch.bool)
        kept[torch.from_numpy(part)] = True
        batches = [
            self._without(each, kept[self._units_of(number)])
            for number, each in enumerate(self._batches)
        ]
        return self._step.measure(batches, self._session.mesh.data.index)

    @staticmethod
    def _without(batch: MicroBatch, kept: torch.Tensor) -> MicroBatch:
        """Return a micro-batch with the labels that are kept, (samples, length).

        A sample of which nothing is kept has other tokens too: its own may give no finite number.
        """
        has_any = kept.any(dim=1, keepdim=True)
        return replace(
            batch,
            labels=torch.where(kept, batch.labels, IGNORED_LABEL),
            input_ids=torch.where(has_any, batch.input_ids, 0),
        )

    def _units_of(self, number: int) -> torch.Tensor:
        """Return the unit of each position of a micro-batch, (samples, length)."""
        first = [self._first[counter] for counter in self._counters[number].tolist()]
        return self._documents[number] + torch.tensor(first)[:, None]

    def describe(self, unit: int) -> dict[str, Any]:
        """Return sample counter, place in the sample, labels and text; on all ranks together."""
        counter = self.sample_of(unit)
        own = None
        for number, counters in enumerate(self._counters.tolist()):
            if counter in counters:
                row = counters.index(counter)
                is_here = self._units_of(number)[row] == unit
                ids = self._batches[number].input_ids[row][is_here].tolist()
                text = self._session.tokenizer.decode(ids)[:EXCERPT]
                own = {"position": int(is_here.nonzero()[0]), "text": text}
        found = next(each for each in self._session.process.gather(own) if each is not None)
        place = found if self._is_text else {**found, "position": None}
        return {"sample": counter, "labels": int(self.labels[unit]), **place}

    def sample_of(self, unit: int) -> int:
        """Return the counter of the sample that a unit is in."""
        return max(counter for counter, first in self._first.items() if first <= unit)
