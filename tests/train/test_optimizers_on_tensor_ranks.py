"""Muon, LAMB and Adafactor over tensor ranks make the update of one process."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from parity_cases import Difference, limit
from rank_processes import Case, curve, tiny_plan, train_cases
from test_optimizers import optimized

from trainctl.config.schema import RunConfig
from trainctl.engines.process import Axis
from trainctl.engines.shards import ElementRange, Shard
from trainctl.runs.layout import RunPaths
from trainctl.train.optimizers.muon import MatrixOptimizer
from trainctl.train.optimizers.partitioned import ParameterPart

KINDS = ("muon", "lamb", "adafactor")
STEPS = 5


@dataclass(frozen=True)
class Layout:
    """Two tensor ranks beside data-parallel ranks and pipeline stages."""

    kind: str
    stage: int = 0
    family: str = "llama"
    vocabulary: int = 260
    """261 is not divided by the tensor ranks: they hold parts that ZeRO cuts elsewhere."""
    tensor: int = 2
    data: int = 1
    pipeline: int = 1

    @property
    def alone(self) -> Layout:
        """Return the same model and optimizer on one process."""
        return Layout(self.kind, family=self.family, vocabulary=self.vocabulary, tensor=1)

    @property
    def ranks(self) -> int:
        return self.tensor * self.data * self.pipeline

    def config(self, **training: object) -> RunConfig:
        if self.family == "gpt2":
            training["model__num_key_value_heads"] = None
        return optimized(
            self.kind,
            self.stage,
            model__family=self.family,
            model__vocab_size=self.vocabulary,
            parallelism__tensor=self.tensor,
            parallelism__pipeline=self.pipeline,
            **training,
        )


LAYOUTS = (
    *(Layout("muon", stage) for stage in range(4)),
    *(Layout(kind, stage) for kind in ("lamb", "adafactor") for stage in (0, 2)),
    *(Layout(kind, 1, "gpt2") for kind in KINDS),  # queries, keys and values in one matrix
    *(Layout("muon", stage, data=2) for stage in (1, 3)),
    *(Layout(kind, 1, vocabulary=261, data=2) for kind in KINDS),
    Layout("adafactor", 3, data=2),
    Layout("muon", 1, data=2, pipeline=2),
)


def train_all(layouts: dict[Layout, Case]) -> None:
    by_size: dict[int, list[Case]] = {}
    for layout, case in layouts.items():
        by_size.setdefault(layout.ranks, []).append(case)
    for size, cases in by_size.items():
        train_cases(size, cases, together=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_curve_matches_one_process(tmp_path: Path) -> None:
    layouts = dict.fromkeys((*LAYOUTS, *(layout.alone for layout in LAYOUTS)))
    cases = {
        layout: Case(
            tiny_plan(layout.config(steps=STEPS), layout.ranks), RunPaths(tmp_path / f"{index}")
        )
        for index, layout in enumerate(layouts)
    }
    train_all(cases)
    curves = {layout: curve(case.run) for layout, case in cases.items()}
    for layout in LAYOUTS:
        expected, found = curves[layout.alone], curves[layout]
        assert expected[STEPS][0] < expected[1][0] - 0.03
        assert Difference.between(expected, found).within(limit(None)), layout


SAVED, END = 3, 5
"""Steps: of the checkpoint, and of the run."""


@pytest.mark.slow
def test_states_go_from_tensor_ranks_to_one_process_and_back(tmp_path: Path) -> None:
    def place(layout: Layout, name: str, attempt: int) -> Case:
        config = layout.config(steps=END, checkpoint__every_steps=SAVED, checkpoint__at_end=False)
        return Case(tiny_plan(config, layout.ranks), RunPaths(tmp_path / name), attempt)

    ways = [
        way
        for kind in KINDS
        for split in (Layout(kind, 1, vocabulary=261),)
        for way in ((split, split.alone), (split.alone, split))
    ]
    starts = {way[0]: place(way[0], f"{i}", 1) for i, way in enumerate(ways)}
    train_all(starts)
    resumed = {}
    for i, way in enumerate(ways):
        shutil.copytree(starts[way[0]].run.root, tmp_path / f"resumed-{i}")
        resumed[way[1]] = place(way[1], f"resumed-{i}", 2)
    train_all(resumed)
    for start, end in ways:
        expected, found = curve(starts[start].run), curve(resumed[end].run)
        for step in range(SAVED + 1, END + 1):
            assert found[step][0] == pytest.approx(expected[step][0], abs=1e-5), (start, step)


SHAPES = [((12, 8), 0, 1), ((8, 12), 1, 1), ((24,), 0, 1), ((4, 36), 1, 3), ((36, 5), 0, 3)]


@pytest.mark.parametrize(("size", "dim", "fused"), [*SHAPES, ((3, 8, 6), 1, 2), ((3, 8, 6), 2, 1)])
def test_a_shard_is_some_rows_and_columns(size: tuple[int, ...], dim: int, fused: int) -> None:
    shape = torch.Size(size)
    whole = torch.arange(shape.numel()).view(-1, shape[-1])
    for index in range(2):
        shard, part = Shard.split(shape, dim=dim, index=index, count=2, fused=fused)
        rows, columns = shard.rows_and_columns(shape, whole.device)
        expected = ElementRange("", shard, 0, part.numel()).indices(whole.device)
        assert torch.equal(whole[rows][:, columns].flatten(), expected)


@pytest.mark.parametrize(("size", "dim", "fused"), [s for s in SHAPES if len(s[0]) == 2])
def test_matrices_are_joined_from_the_pieces_of_all_ranks(
    size: tuple[int, int], dim: int, fused: int
) -> None:
    """Two tensor ranks with two replicas each, whose border is anywhere."""
    shape = torch.Size(size)
    whole, pieces, lengths = torch.randn(shape), {}, []
    for index in range(2):
        shard, part = Shard.split(shape, dim=dim, index=index, count=2, fused=fused)
        values = whole.flatten()[ElementRange("", shard, 0, part.numel()).indices(whole.device)]
        pieces[0, index], pieces[1, index] = values[:7], values[7:]
    sent = [pieces[replica, index] for replica in range(2) for index in range(2)]
    lengths = [piece.numel() for piece in sent]
    optimizer = MatrixOptimizer(
        [{"params": [torch.nn.Parameter(whole)]}], momentum=0, betas=(0, 0), eps=1, fused=False
    )
    optimizer.tensor = Axis(0, (0, 1), None)  # type: ignore[arg-type]
    own = ParameterPart("matrix", shape, ((0, 7), (7, part.numel())), 0, 0, shard=shard)
    assert optimizer._lengths(own) == lengths
    joined = optimizer._joined(torch.cat(sent), own, lengths)
    assert torch.equal(joined.view(shape), whole)
    assert torch.equal(optimizer._cut_again(joined, own, lengths), torch.cat(sent))
