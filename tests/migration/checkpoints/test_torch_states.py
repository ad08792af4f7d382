"""Which parameter a number of torch's optimizer means, and what is refused."""

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer

from trainctl.errors import TrainctlError
from trainctl.migration.checkpoints.torch_states import SavedOptimizer
from trainctl.migration.checkpoints.trainer import trainer_groups

FILE = Path("optimizer.pt")


class Stored:
    """A tensor in a file."""

    def __init__(self, tensor):
        self.tensor, self.shape = tensor, tuple(tensor.shape)

    def read(self, start=0, end=None):
        return self.tensor.reshape(-1)[start:end]


def llama(**changes):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 40}
    config = LlamaConfig(**{**sizes, "num_attention_heads": 2, **changes})
    return LlamaForCausalLM(config)


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=8))


def shapes_of(model):
    return {name: tuple(each.shape) for name, each in model.named_parameters()}


def saved(model, groups):
    """Return what an optimizer saves over groups of names; its first moments say the name."""
    parameters = dict(model.named_parameters())
    made = torch.optim.AdamW([{"params": [parameters[name] for name in g]} for g in groups])
    for each in parameters.values():
        each.grad = torch.randn_like(each)
    made.step()
    content = made.state_dict()
    state = {
        index: {name: Stored(value) for name, value in states.items()}
        for index, states in content["state"].items()
    }
    return SavedOptimizer.of(FILE, {**content, "state": state}), made.state


@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("grouping", ["one", "trainer"])
def test_the_models_order_and_the_shapes_of_each_group_tell_the_parameter(build, grouping):
    model = build()
    shapes = shapes_of(model)
    groups = [list(shapes)] if grouping == "one" else trainer_groups(model)
    optimizer, states = saved(model, groups)
    found = optimizer.by_name(shapes)
    assert set(found) == set(shapes)
    for name, parameter in model.named_parameters():
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found[name][state].tensor, states[parameter][state])


@pytest.mark.parametrize("build", [llama, gpt2])
def test_groups_are_those_of_the_trainer(build):
    model = build()
    decayed = Trainer.get_decay_parameter_names(None, model)
    names = list(shapes_of(model))
    assert trainer_groups(model) == [
        [name for name in names if name in decayed],
        [name for name in names if name not in decayed],
    ]


def interleaved(model):
    """Return groups in which parameters of one shape are in both."""
    names = list(shapes_of(model))
    return [names[::2], names[1::2]]


def test_a_number_that_may_be_two_parameters_is_refused():
    model = llama()
    optimizer, _ = saved(model, interleaved(model))
    with pytest.raises(TrainctlError, match="does not follow") as caught:
        optimizer.by_name(shapes_of(model))
    assert "get_optimizer_state_dict" in caught.value.hint


def test_the_trainers_own_rule_decides_where_shapes_leave_a_choice():
    model = llama()
    groups = interleaved(model)
    optimizer, states = saved(model, groups)
    found = optimizer.by_name(shapes_of(model), groups)
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name]["exp_avg"].tensor, states[parameter]["exp_avg"])


def test_saved_names_are_taken():
    model = llama()
    groups = interleaved(model)
    optimizer, states = saved(model, groups)
    for group, names in zip(optimizer.groups, groups, strict=True):
        group["param_names"] = names
    found = optimizer.by_name(shapes_of(model))
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name]["exp_avg"].tensor, states[parameter]["exp_avg"])


def test_states_of_another_number_of_parameters_are_refused():
    optimizer, _ = saved(llama(), trainer_groups(llama()))
    with pytest.raises(TrainctlError, match="does not follow"):
        optimizer.by_name(shapes_of(llama(num_hidden_layers=3)))


def test_a_missing_state_is_named():
    model = llama()
    optimizer, _ = saved(model, [list(shapes_of(model))])
    del optimizer.state[1]["exp_avg_sq"]
    with pytest.raises(TrainctlError, match=r"exp_avg_sq of model\.layers\.0\S+q_proj"):
        optimizer.by_name(shapes_of(model))


def test_step_counts_that_differ_are_refused():
    model = llama()
    optimizer, _ = saved(model, [list(shapes_of(model))])
    optimizer.state[3]["step"] = Stored(torch.tensor(7.0))
    with pytest.raises(TrainctlError, match="step of the optimizer is 7 for 3"):
        optimizer.names_and_scalars()


@pytest.mark.parametrize(
    "content", [None, [], {"state": {}}, {"state": {0: 1}, "param_groups": []}]
)
def test_what_is_no_optimizer_is_refused(content):
    with pytest.raises(TrainctlError):
        SavedOptimizer.of(FILE, content)
