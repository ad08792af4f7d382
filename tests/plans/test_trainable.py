"""Tests that every tensor is either trainable or frozen under any setting."""

from __future__ import annotations

import pytest
from anatomies import SMALL
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import config_with

from trainctl.config.codec import to_plain
from trainctl.errors import TrainctlError
from trainctl.models.anatomy import parse_anatomy
from trainctl.options.adapter import BaseWeights
from trainctl.plans.identity import check_trainable
from trainctl.plans.optimizers import parameter_groups
from trainctl.plans.shapes import all_tensors
from trainctl.plans.trainable import idle_stages, matching_parameters, trainable

LLAMA = {"model__num_layers": 4}
KINDS = ("lora", "dora", "rslora")


@given(
    entries=st.lists(
        st.sampled_from(
            ["embeddings", "head", "norm", "mlp", r"layers\.[01]\.", "self_attn.q_proj", "typo"]
            + [f"all_but_last_blocks:{count}" for count in range(5)]
        ),
        unique=True,
    ),
    tied=st.booleans(),
)
def test_each_tensor_trains_or_stays(entries: list[str], tied: bool) -> None:
    config = config_with(**LLAMA, training__freeze=entries, model__tie_word_embeddings=tied)
    found = trainable(config)
    names = [tensor.name for tensor in all_tensors(config.model)]
    trained = [tensor.name for tensor in found.trained]
    frozen = [tensor.name for tensor in found.frozen]
    assert sorted(trained + frozen) == sorted(names)
    assert set(frozen) == {
        name for entry in entries for name in matching_parameters(config.model, entry)
    }
    grouped = [name for group in parameter_groups(config) for name in group.parameters]
    assert sorted(grouped) == sorted(trained)


@given(
    kind=st.sampled_from(KINDS),
    rank=st.integers(1, 64),
    targets=st.lists(st.sampled_from(["q_proj", "v_proj", "mlp.down_proj"]), unique=True),
    family=st.sampled_from(["llama", "gpt2", "qwen3"]),
)
def test_an_adapter_freezes_all_and_adds_two_matrices_a_layer(
    kind: str, rank: int, targets: list[str], family: str
) -> None:
    config = config_with(
        adapter__kind=kind, adapter__rank=rank, adapter__targets=targets, model__family=family
    )
    found = trainable(config)
    assert found.frozen == tuple(all_tensors(config.model))
    assert len(found.trained) == len(found.adapted) * (3 if kind == "dora" else 2)
    shapes = {tensor.name: tensor.shape for tensor in (*found.trained, *found.frozen)}
    for layer in found.adapted:
        assert not targets or any(layer.name.endswith(f".{target}") for target in targets)
        assert shapes[f"{layer.name}.lora_A"] == (rank, layer.inputs)
        assert shapes[f"{layer.name}.lora_B"] == (layer.outputs, rank)
        weight = shapes[f"{layer.name}.weight"]
        assert weight == (
            (layer.inputs, layer.outputs) if family == "gpt2" else (layer.outputs, layer.inputs)
        )


def test_of_an_anatomy_the_layers_of_blocks_are_adapted() -> None:
    anatomy = parse_anatomy(SMALL)
    config = config_with(
        model__family="hf",
        model__path="m",
        model__anatomy=SMALL,
        model__num_layers=len(anatomy.blocks),
        adapter__kind="lora",
    )
    weights = {parameter.name: parameter for parameter in anatomy.parameters}
    for layer in trainable(config).adapted:
        parameter = weights[f"{layer.name}.weight"]
        assert parameter.block is not None and sorted(parameter.shape) == sorted(
            (layer.inputs, layer.outputs)
        )
    frozen = config_with(
        model__family="hf",
        model__path="m",
        model__anatomy=SMALL,
        model__num_layers=len(anatomy.blocks),
        training__freeze=["all_but_last_blocks:1"],
    )
    assert {weights[tensor.name].block for tensor in trainable(frozen).trained} <= {
        len(anatomy.blocks) - 1,
        None,
    }


def test_freeze_shortcuts_select_the_named_parameters() -> None:
    model = config_with(**LLAMA).model
    assert matching_parameters(model, "embeddings") == ("model.embed_tokens.weight",)
    assert matching_parameters(model, "head") == ("lm_head.weight",)
    assert len(matching_parameters(model, "all_but_last_blocks:4")) == 1
    tied = config_with(**LLAMA, model__tie_word_embeddings=True).model
    assert (
        matching_parameters(tied, "head")
        == matching_parameters(tied, "lm_head")
        == ("model.embed_tokens.weight",)
    )


def test_a_stage_of_a_pipeline_may_have_nothing_to_train() -> None:
    def idle(*entries: str, **changes: object) -> list[int]:
        config = config_with(**LLAMA, training__freeze=list(entries), **changes)
        return idle_stages(config, (2, 2))

    assert idle("embeddings") == []
    assert idle("all_but_last_blocks:2") == [0]
    assert idle("norm", "head", r"layers\.[23]\.") == [1]
    assert idle("norm", r"layers\.\d", model__tie_word_embeddings=True) == []
    adapted = config_with(**LLAMA, adapter__kind="lora", adapter__targets=["q_proj"])
    assert idle_stages(adapted, (1, 3)) == []


def test_a_checkpoint_of_before_a_key_is_read_with_its_default() -> None:
    config = config_with(adapter__kind="lora")
    adapter = to_plain(config.adapter)
    assert adapter.pop("base_weights") == "compute"
    shapes = {tensor.name: list(tensor.shape) for tensor in trainable(config).trained}
    check_trainable(config, "step-1", {"base": {}, "adapter": adapter, "shapes": shapes})
    config.adapter.base_weights = BaseWeights.nf4
    with pytest.raises(TrainctlError, match='base_weights was "compute", and is "nf4"'):
        check_trainable(config, "step-1", {"base": {}, "adapter": adapter, "shapes": shapes})
