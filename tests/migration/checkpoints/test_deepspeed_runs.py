"""Trainings of plain DeepSpeed go on in trainctl and back, with the losses of DeepSpeed alone."""

import math
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from deepspeed_cases import JOURNEYS, Differences, Journey, differences, saved_by_deepspeed

from trainctl.errors import TrainctlError
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


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeeds_own_conversion_to_universal_has_the_same_values(
    stage: int, found: dict[Journey, Differences], folder: Path
) -> None:
    from deepspeed.checkpoint import ds_to_universal

    journey = next(each for each in found if each.stage == stage and each.processes == 2)
    saved = saved_by_deepspeed(folder, journey)
    out = folder / f"converted-{stage}" / "global_step3"
    settings = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    ds_to_universal.main(
        Namespace(
            input_folder=str(saved / "global_step3"),
            output_folder=str(out),
            strict=True,
            inject_missing_state=True,
            **settings,
        )
    )
    source, converted = open_source(saved), open_source(out.parent)
    assert converted.format == "universal"
    for left, right in (
        (source.progress, converted.progress),
        (source.scalars, converted.scalars),
        (source.hyperparameters, converted.hyperparameters),
    ):
        assert left == right
    for name, shape in source.shapes.items():
        for state in source.states:
            values = (each.read(name, state, 0, math.prod(shape)) for each in (source, converted))
            assert torch.equal(*values), (name, state)
    (out / "zero" / "model.norm.weight" / "exp_avg.pt").unlink()
    with pytest.raises(TrainctlError, match=r"model\.norm\.weight/exp_avg\.pt: it is missing"):
        open_source(out)
