"""Trainings of plain DeepSpeed go on in trainctl and back, with the losses of DeepSpeed alone."""

from pathlib import Path

import pytest
from deepspeed_cases import JOURNEYS, Differences, Journey, differences, saved_by_deepspeed

from trainctl.migration.checkpoints.source import open_source

TOLERANCE = 1e-5
"""Nats, in fp32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journeys")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[Journey, Differences]:
    return differences(folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("journey", JOURNEYS, ids=lambda journey: journey.name)
def test_losses_are_those_of_deepspeed_alone(
    journey: Journey, found: dict[Journey, Differences], folder: Path
) -> None:
    assert found[journey].imported <= TOLERANCE
    assert found[journey].returned <= TOLERANCE
    source = open_source(saved_by_deepspeed(folder, journey))
    assert (source.progress.step, source.progress.samples) == (3, 24)
    assert source.scalars == {"step": 3.0}
    assert source.hyperparameters["weight_decay"] == 0.1
