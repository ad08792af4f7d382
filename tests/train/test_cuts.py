"""Other architectures along the axes that may cut them: the curve of one process."""

import pytest
from architecture_cases import COLUMNS, PAIRS, directory, plan
from parity_cases import TOLERANCE, Difference
from rank_processes import Case, curve, train_cases

from trainctl.runs.layout import RunPaths

FEW = 6


@pytest.mark.slow
def test_an_axis_that_may_cut_an_architecture_gives_its_curve(tmp_path):
    """A few of the table's cells, in few steps; `scripts/architectures.py` trains them all."""
    models = {kind: directory(tmp_path / kind, kind) for kind, _ in PAIRS}
    alone = {
        kind: Case(plan(model, {}, steps=FEW), RunPaths(tmp_path / f"{kind}-alone"))
        for kind, model in models.items()
    }
    cut = {
        (kind, column): Case(
            plan(models[kind], COLUMNS[column], steps=FEW),
            RunPaths(tmp_path / f"{kind}-{column}"),
        )
        for kind, column in PAIRS
    }
    for world, cases in ((1, alone), (2, cut)):
        for refusals in train_cases(world, list(cases.values()), probe="architecture_probe:train"):
            assert not any(refusals), refusals
    for (kind, column), case in cut.items():
        reference, found = curve(alone[kind].run), curve(case.run)
        assert list(found) == list(reference) == list(range(1, FEW + 1))
        difference = Difference.between(reference, found)
        assert max(difference.loss, difference.norm) <= TOLERANCE, (kind, column)
