"""muP in the plan: the table of factors, and what follows from it."""

from __future__ import annotations

import math

import pytest
from plan_cases import config_with, cpus

from trainctl.config.registry import load_specs
from trainctl.options.model import families
from trainctl.plans import mup
from trainctl.plans.mup import TensorKind
from trainctl.plans.optimizers import parameter_groups
from trainctl.rules.resolve import resolve

FAMILIES = [spec.name for spec in families() if spec.has_mup]
WIDE = {
    "model__mup": True,
    "model__mup_base_width": 64,
    "model__hidden_size": 256,
    "model__intermediate_size": 512,
    "model__num_attention_heads": 8,
    "model__num_key_value_heads": 4,
}
"""Four times the base's width."""


def wide(**changes):
    return config_with(**{**WIDE, **changes})


TABLE = {
    "adamw": {"embedding": 1.0, "hidden": 1 / 4, "output": 1.0, "vector": 1.0},
    "adam": {"embedding": 1.0, "hidden": 1 / 4, "output": 1.0, "vector": 1.0},
    "lion": {"embedding": 1.0, "hidden": 1 / 4, "output": 1.0, "vector": 1.0},
    "adamw_8bit": {"embedding": 1.0, "hidden": 1 / 4, "output": 1.0, "vector": 1.0},
    "sgd": {"embedding": 4.0, "hidden": 1.0, "output": 4.0, "vector": 4.0},
    "muon": {"embedding": 1.0, "hidden": 1.0, "output": 1.0, "vector": 1.0},
}
"""arXiv:2203.03466, table 8, with 4 for fan_out and fan_in over the base's."""


@pytest.mark.parametrize("kind", TABLE)
def test_the_factors_match_the_table(kind):
    config = wide(optimizer__kind=kind)
    for name, expected in TABLE[kind].items():
        tensor = TensorKind(name)
        factor = mup.lr_factor(config.model, config.optimizer, tensor)
        assert factor == expected
        assert factor * mup.decay_factor(config.model, config.optimizer, tensor) == 1
        deviation = mup.initial_factor(config.model, tensor)
        assert deviation == (0.5 if tensor is TensorKind.hidden else 1)
    assert mup.output_multiplier(config.model) == 1 / 4
    assert set(TABLE) == {spec.name for spec in load_specs("optimizer") if spec.width_rule}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_learns_as_its_kind_and_decays_as_the_base(family, tied):
    changes = {"model__num_key_value_heads": None} if family == "gpt2" else {}
    config = wide(model__family=family, model__tie_word_embeddings=tied, **changes)
    plain = wide(model__family=family, model__tie_word_embeddings=tied, model__mup=False, **changes)
    before = {name: group for group in parameter_groups(plain) for name in group.parameters}
    after = {name: group for group in parameter_groups(config) for name in group.parameters}
    assert before.keys() == after.keys()
    for name, group in after.items():
        is_hidden = before[name].weight_decay > 0 and "lm_head" not in name
        assert group.lr_factor == (1 / 4 if is_hidden else 1), name
        step = group.lr_factor * group.weight_decay
        assert step == pytest.approx(before[name].lr_factor * before[name].weight_decay), name
    assert ("lm_head.weight" in after) != tied


@pytest.mark.parametrize("kind", TABLE)
def test_at_the_base_width_nothing_changes(kind):
    same = {"model__mup": True, "model__mup_base_width": 128, "optimizer__weight_decay": 0.0}
    plans = [
        resolve(config_with(optimizer__kind=kind, **changes), cpus()).plan
        for changes in ({"optimizer__weight_decay": 0.0}, same)
    ]
    assert None not in plans
    assert plans[0].deepspeed == plans[1].deepspeed
    groups = [parameter_groups(plan.config) for plan in plans]
    assert groups[0] == groups[1]
    assert not any("mup" in text for text in plans[1].not_yet)


def test_epsilon_shrinks_as_the_gradients_do():
    plan = resolve(wide(optimizer__epsilon=4e-8), cpus()).plan
    assert plan.deepspeed["optimizer"]["params"]["eps"] == 1e-8
    derived = {item.key: item for item in plan.derived}
    assert derived["mup.width_factor"].value == 4
    assert derived["mup.hidden_deviation"].value == 0.01
    assert derived["mup.output_multiplier"].value == 0.25
    assert "mup.width_factor" in derived["optimizer.params.eps"].reason


def test_heads_that_grow_have_another_scale():
    fixed = wide(model__mup_base_head_dim=32)
    assert mup.attention_factor(fixed.model) == 1
    growing = wide(model__num_attention_heads=2, model__num_key_value_heads=2,
                   model__mup_base_head_dim=32)  # fmt: skip
    assert mup.base_heads(growing.model) == (2, 2)
    plan = resolve(growing, cpus()).plan
    derived = {item.key: item.value for item in plan.derived}
    assert derived["mup.attention_scale"] == pytest.approx(math.sqrt(32) / 128)


def test_a_script_gets_none_of_it(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    plan = resolve(wide(script=str(script)), cpus()).plan
    assert plan.deepspeed["optimizer"]["params"]["eps"] == 1e-8
    assert not any(item.key.startswith("mup.") for item in plan.derived)
