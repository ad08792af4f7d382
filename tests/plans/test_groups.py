"""The rule of the optimizer's parameter groups."""

from __future__ import annotations

import random

import pytest
from plan_cases import config_with, cpus

from trainctl.config.registry import list_kinds
from trainctl.monitor.plan_text import plan_lines
from trainctl.plans.optimizers import group_of, group_rate, parameter_groups
from trainctl.plans.shapes import all_tensors, count_parameters
from trainctl.rules.resolve import resolve

FAMILIES = ("llama", "mistral", "qwen3", "gpt2")


def random_config(draw: random.Random):
    """Draw a configuration whose parameter groups may be cut in any way."""
    patterns = ("norm", r"\.0\.", "embed|wte", "proj", "bias", "weight", "lm_head")
    return config_with(
        model__family=draw.choice(FAMILIES),
        model__num_layers=draw.randint(1, 12),
        model__num_key_value_heads=None,
        model__tie_word_embeddings=draw.random() < 0.5,
        optimizer__kind=draw.choice(list_kinds("optimizer")),
        optimizer__weight_decay=draw.choice((0.0, 0.1)),
        optimizer__decay_embeddings=draw.random() < 0.5,
        optimizer__layer_lr_decay=draw.choice((1.0, 0.9)),
        optimizer__groups=[
            {
                "match": draw.choice(patterns),
                "lr_factor": draw.choice((1.0, 0.5)),
                "weight_decay": draw.choice((None, 0.0, 0.2)),
            }
            for _ in range(draw.randint(0, 3))
        ],
    )


@pytest.mark.parametrize("seed", range(60))
def test_every_tensor_is_in_exactly_one_group_and_the_counts_add_up(seed):
    config = random_config(random.Random(seed))
    groups = parameter_groups(config)
    names = [name for group in groups for name in group.parameters]
    assert sorted(names) == sorted(tensor.name for tensor in all_tensors(config.model))
    count = count_parameters(config.model)
    assert (len(names), sum(group.elements for group in groups)) == (count.tensors, count.total)
    assert len({group.name for group in groups}) == len(groups)


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_biases_and_embeddings_are_not_decayed(family):
    config = config_with(model__family=family, model__num_key_value_heads=None)
    config.model.tie_word_embeddings = False
    decayed, undecayed = parameter_groups(config)
    assert (decayed.weight_decay, undecayed.weight_decay) == (config.optimizer.weight_decay, 0.0)
    words = ("norm", "ln_", "bias", "embed", "wte", "wpe")
    assert all(any(word in name for word in words) for name in undecayed.parameters)
    assert not any(any(word in name for word in words) for name in decayed.parameters)
    assert "lm_head.weight" in decayed.parameters


def test_muon_updates_the_matrices_of_the_blocks_and_nothing_else():
    config = config_with(optimizer__kind="muon", optimizer__matrix_lr=0.02)
    config.model.tie_word_embeddings = False
    muon, *others = parameter_groups(config)
    assert muon.uses_muon and not any(group.uses_muon for group in others)
    assert all(".layers." in name and "norm" not in name for name in muon.parameters)
    assert group_rate(muon, config, 1.0) == 0.02
    assert {group_rate(group, config, 1.0) for group in others} == {config.optimizer.lr}


def test_a_limit_of_the_norm_makes_a_group_of_its_own():
    limit = {"match": "embed", "gradient_clipping": 0.1}
    groups = parameter_groups(config_with(optimizer__groups=[limit, {"match": "norm"}]))
    (own,) = [group for group in groups if "clip 0.1" in group.name]
    assert own.parameters == ("model.embed_tokens.weight",)
    assert len(groups) == 3 and len({group.name for group in groups}) == 3


def test_entries_with_the_same_limit_are_clipped_apart():
    entries = [{"match": f"layers.{at}", "gradient_clipping": 0.1} for at in range(2)]
    config = config_with(optimizer__groups=entries)
    groups = {name: group.name for group in parameter_groups(config) for name in group.parameters}
    assert groups["model.layers.0.mlp.up_proj.weight"] == "decayed, clip 0.1 at 0"
    assert groups["model.layers.1.mlp.up_proj.weight"] == "decayed, clip 0.1 at 1"


def test_a_learning_rate_falls_by_its_factor_for_each_block_above():
    config = config_with(optimizer__layer_lr_decay=0.5, model__num_layers=3)
    factors = {
        name: group.lr_factor for group in parameter_groups(config) for name in group.parameters
    }
    assert factors["model.norm.weight"] == 1
    assert factors["model.layers.2.mlp.up_proj.weight"] == 1
    assert factors["model.layers.0.input_layernorm.weight"] == 0.25
    assert factors["model.embed_tokens.weight"] == 0.125


def test_the_first_entry_that_matches_holds():
    entries = [
        {"match": "mlp", "lr_factor": 0.5},
        {"match": "weight", "lr_factor": 0.1, "weight_decay": 0.3},
    ]
    config = config_with(optimizer__groups=entries)
    mlp = group_of(config, "model.layers.0.mlp.up_proj.weight", (8, 8))
    assert (mlp.lr_factor, mlp.weight_decay) == (0.5, config.optimizer.weight_decay)
    norm = group_of(config, "model.norm.weight", (8,))
    assert (norm.lr_factor, norm.weight_decay) == (0.1, 0.3)


def test_mup_scales_the_learning_rate_of_hidden_matrices_and_keeps_what_a_step_decays():
    config = config_with(model__mup=True, model__mup_base_width=64, model__hidden_size=256)
    hidden = group_of(config, "model.layers.0.mlp.up_proj.weight", (512, 256))
    assert hidden.lr_factor == 0.25
    assert hidden.lr_factor * hidden.weight_decay == pytest.approx(config.optimizer.weight_decay)
    assert group_of(config, "model.embed_tokens.weight", (260, 256)).lr_factor == 1


def test_the_plan_prints_the_groups_and_their_counts():
    config = config_with(optimizer__groups=[{"match": "q_proj", "lr_factor": 0.5}])
    plan = resolve(config, cpus(2)).plan
    lines = "\n".join(plan_lines(plan))
    for group in parameter_groups(config):
        assert f"{group.name}: {len(group.parameters)} tensors" in lines
    assert "decayed, lr x0.5" in lines


def test_muon_takes_matrices_only():
    """Some architectures hold all experts of a block in one tensor of three dimensions."""
    config = config_with(optimizer__kind="muon")
    name = "model.layers.0.mlp.experts.down_proj"
    assert group_of(config, name, (64, 32)).uses_muon
    assert not group_of(config, name, (8, 64, 32)).uses_muon
