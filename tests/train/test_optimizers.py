"""Each optimizer against a reference, at every ZeRO stage, and from checkpoints."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases
from torch.optim import _muon

from trainctl.config.registry import list_kinds
from trainctl.config.schema import RunConfig
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.models.model import skeleton, whole_pieces
from trainctl.train.optimizers import adamw_8bit
from trainctl.train.optimizers.muon import MatrixOptimizer, orthogonalize
from trainctl.train.optimizers.partitioned import ParameterPart

Curve = dict[int, tuple[float, float]]

STEPS = 5
KINDS = list_kinds("optimizer")

LEARNING_RATES = {
    "lion": 1e-3,
    "muon": 3e-3,
    "lamb": 1e-2,
    "adafactor": 1e-2,
    "sgd": 0.1,
}


def optimized(kind: str, stage: int = 0, **training: object) -> RunConfig:
    """Build a tiny configuration with this optimizer. Matrices have at least 4096 elements, the
    minimum for 8-bit states.
    """
    own = {"muon": {"matrix_lr": 0.02}, "adafactor": {"epsilon": 1e-30}}.get(kind, {})
    return tiny_config(
        evaluation_samples=0,
        sample_tokens=0,
        optimizer__kind=kind,
        optimizer__lr=LEARNING_RATES.get(kind, 3e-3),
        optimizer__weight_decay=0.0 if kind in ("adam", "sgd") else 0.1,
        schedule__warmup_steps=2,
        zero_stage__stage=stage,
        precision__compute="fp32",
        **{f"optimizer__{key}": value for key, value in own.items()},
        **training,
    )


TOLERANCE = {
    # Rounding: sums in another order; of a momentum that is nearly nothing, the sign.
    "adafactor": 1e-4,
    "lamb": 1e-3,
    "lion": 1e-3,
    "muon": 1e-4,
}


def test_each_kind_makes_the_update_of_a_reference_step_by_step(tmp_path):
    cases = [
        Case(tiny_plan(optimized(kind, steps=STEPS), 1), RunPaths(tmp_path / kind))
        for kind in KINDS
    ]
    (found,) = train_cases(1, cases, probe="optimizer_probe:distances")
    for kind, worst in zip(KINDS, found, strict=True):
        assert max(worst.values()) < TOLERANCE.get(kind, 1e-5), (kind, worst)


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)])
def test_matrices_are_orthogonalised_as_by_torch(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = _muon._zeropower_via_newtonschulz(
        matrix, (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C), 5, _muon.EPS
    )
    assert torch.equal(orthogonalize(matrix, torch.bfloat16), expected)
    values = torch.linalg.svdvals(orthogonalize(matrix, torch.float32))
    assert values.min() > 0.5 and values.max() < 1.3


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_muon_s_step_is_as_large_whichever_way_a_matrix_lies(shape):
    """gpt2's have their inputs in rows: the same layer, transposed."""
    matrix, gradient = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    changes = []
    for turn, inputs_first in ((lambda m: m, False), (torch.t, True)):
        flat = turn(matrix).reshape(-1).clone()
        flat.grad = turn(gradient).reshape(-1).clone()
        group = {"params": [flat], "lr": 0.1, "uses_muon": True}
        optimizer = MatrixOptimizer(
            [group],
            momentum=0.9,
            betas=(0.9, 0.95),
            eps=1e-8,
            fused=False,
            iterate_in=torch.float32,
        )
        size, lies = flat.numel(), turn(matrix).shape
        part = ParameterPart("matrix", lies, ((0, size),), 0, 0, inputs_first=inputs_first)
        optimizer.bind({flat: [part]}, None)
        optimizer.step()
        changes.append(turn(flat.view(lies)) - matrix)
    torch.testing.assert_close(changes[1], changes[0], rtol=1e-4, atol=1e-5)


def test_the_rows_of_gpt2_s_matrices_are_known_to_be_inputs():
    config = optimized("muon")
    for family, expected in (("llama", False), ("gpt2", True)):
        config.model.family = family
        pieces = whole_pieces(skeleton(config.model, torch.float32))
        found = {p.inputs_first for p in pieces.values() if re.search("mlp.*weight", p.name)}
        assert found == {expected}


OWN = (
    "lion",
    "muon",
    "adamw_8bit",
    "adafactor",
    "lamb",
)
"""Made by trainctl."""

SAVED, END = 3, 5
"""Steps: of the checkpoint, and of the run."""


@pytest.mark.slow
def test_every_stage_trains_and_resumes_from_every_other(tmp_path):
    # From each stage half of the kinds stay, and half move to the next.
    ways = {
        kind: [(stage, (stage + (stage + number) % 2) % 4) for stage in range(4)]
        for number, kind in enumerate(("adamw", *OWN))
    }
    for kind, curves in _train_and_resume(ways, tmp_path).items():
        for trained in curves.values():
            losses = [loss for loss, _ in trained.values()]
            assert losses[-1] < losses[0] - 0.05, kind
            for step, (loss, norm) in trained.items():
                assert loss == pytest.approx(curves[0][step][0], abs=1e-5), kind
                assert norm == pytest.approx(curves[0][step][1], rel=1e-4), kind


def _train_and_resume(
    ways: dict[str, list[tuple[int, int]]], folder: Path
) -> dict[str, dict[int, Curve]]:
    """Train at the first stage of each pair, and resume its checkpoint at the second.

    Returns:
        Curves of the uninterrupted runs, by optimizer kind and stage.
    """

    def case(kind: str, stage: int, name: str, attempt: int) -> Case:
        config = optimized(kind, stage, steps=END)
        config.checkpoint.every_steps, config.checkpoint.at_end = SAVED, False
        return Case(tiny_plan(config, 2), RunPaths(folder / f"{kind}-{name}"), attempt)

    starts = {
        (kind, start): case(kind, start, f"{start}", 1)
        for kind, pairs in ways.items()
        for start, _ in pairs
    }
    train_cases(2, list(starts.values()), together=True)
    resumed = {}
    for kind, (start, end) in ((kind, pair) for kind, pairs in ways.items() for pair in pairs):
        name = f"{start}-{end}"
        shutil.copytree(starts[kind, start].run.root, folder / f"{kind}-{name}")
        resumed[kind, start, end] = case(kind, end, name, 2)
    train_cases(2, list(resumed.values()), together=True)
    curves: dict[str, dict[int, Curve]] = {kind: {} for kind in ways}
    for (kind, start), each in starts.items():
        curves[kind][start] = curve(each.run)
    for (kind, start, end), again in resumed.items():
        assert _resumed_from(again.run) == f"step-{SAVED:08d}"
        for step in range(SAVED + 1, END + 1):
            straight, other = curves[kind][start][step], curve(again.run)[step]
            if start == end:
                assert other == straight, (kind, start, step)
            else:
                assert other[0] == pytest.approx(straight[0], abs=1e-5), (kind, start, end, step)
    return curves


def _resumed_from(run: RunPaths) -> str:
    starts = [event for event in read_events(run.events) if event["event"] == "start"]
    name: str = starts[-1]["resumed_from"]
    return name


def test_eight_bit_states_do_not_depend_on_how_much_is_updated_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rank's part starts and ends within a quantization block, after another parameter."""
    shape, start, end = torch.Size((96, 128)), 1_000, 11_500
    small = ParameterPart(
        name="small", shape=torch.Size((100,)), ranges=((0, 100),), index=0, offset=0
    )
    cut = ((0, start), (start, end), (end, shape.numel()))
    parts = [small, ParameterPart(name="matrix", shape=shape, ranges=cut, index=1, offset=100)]
    first = torch.randn(100 + end - start)
    gradients = [torch.randn_like(first) for _ in range(3)]
    results = []
    for at_once in (2**22, 1024):
        monkeypatch.setattr(adamw_8bit, "AT_ONCE", at_once)
        tensor = torch.nn.Parameter(first.clone())
        optimizer = adamw_8bit.AdamW8bit([{"params": [tensor], "lr": 1e-2}], (0.9, 0.95), 1e-8)
        optimizer.bind({tensor: parts}, None)
        for tensor.grad in gradients:
            optimizer.step()
        sides = [
            side.values for part in parts for side in optimizer.sides(tensor, part.name).values()
        ]
        results.append([tensor.detach(), *optimizer.state[tensor].values(), *sides])
    assert len(results[0]) == 8
    for whole, in_stretches in zip(*results, strict=True):
        assert torch.equal(whole, in_stretches)
