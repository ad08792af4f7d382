"""Initial weights: a pure function that any range can be asked of, with the right statistics."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from trainctl.config.schema import ModelConfig
from trainctl.errors import TrainctlError
from trainctl.train.model import skeleton, transformers_config
from trainctl.train.weights import CHUNK, SafetensorsWeights, SeedWeights

MATRIX = torch.Size([300, 700])


@settings(max_examples=30)
@given(st.integers(0, MATRIX.numel() - 1), st.integers(1, MATRIX.numel()))
def test_a_range_is_a_slice_of_the_whole(start, length):
    end = min(start + length, MATRIX.numel())
    source = SeedWeights(11, std=0.02)
    whole = source.read("model.w.weight", MATRIX, 0, MATRIX.numel())
    assert torch.equal(source.read("model.w.weight", MATRIX, start, end), whole[start:end])


def test_names_seeds_and_chunks_differ():
    def read(seed, name):
        return SeedWeights(seed, std=1.0).read(name, MATRIX, 0, MATRIX.numel())

    first = read(1, "a.weight")
    assert torch.equal(first, read(1, "a.weight"))
    for other in (read(2, "a.weight"), read(1, "b.weight")):
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 0.02
    assert not torch.equal(first[:1000], first[CHUNK : CHUNK + 1000])


FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 32},
    "mistral": {},
    "gpt2": {"num_key_value_heads": None, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_equal_the_ones_of_transformers(family):
    """Every parameter has the mean and deviation that transformers' own initialisation gives it."""
    from transformers import AutoModelForCausalLM

    shape = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_layers": 2}
    model = ModelConfig(family=family, **{**shape, "num_key_value_heads": 2, **FAMILIES[family]})
    theirs = dict(AutoModelForCausalLM.from_config(transformers_config(model)).named_parameters())
    source = SeedWeights.of(model, 1)
    ours = dict(skeleton(model, torch.float32).named_parameters())
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        assert parameter.is_meta
        values = source.read(name, parameter.shape, 0, parameter.numel())
        expected = theirs[name].detach().flatten()
        assert values.shape == expected.shape
        if expected.std() == 0:
            assert torch.equal(values, expected), name
        else:
            assert float(values.std() / expected.std()) == pytest.approx(1, rel=0.03), name
            assert abs(float(values.mean())) < 0.2 * float(expected.std()), name


def test_safetensors_ranges_and_problems(tmp_path):
    tensor = torch.arange(35.0).view(5, 7)
    save_file({"a.weight": tensor, "b.bias": torch.ones(3)}, tmp_path / "model.safetensors")
    source = SafetensorsWeights(tmp_path)
    assert source.read("a.weight", tensor.shape, 5, 19).tolist() == list(range(5, 19))
    assert source.read("b.bias", torch.Size([3]), 1, 3).tolist() == [1.0, 1.0]
    with pytest.raises(TrainctlError, match=r"has no tensor c\.weight"):
        source.read("c.weight", tensor.shape, 0, 1)
    with pytest.raises(TrainctlError, match=r"shape \[5, 7\]"):
        source.read("a.weight", torch.Size([7, 5]), 0, 1)
    with pytest.raises(TrainctlError, match="has neither"):
        SafetensorsWeights(tmp_path / "nowhere")
