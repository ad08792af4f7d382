"""Initial weights: a pure function that any range can be asked of, with the right statistics."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from trainctl.config.schema import ModelConfig
from trainctl.errors import TrainctlError
from trainctl.train.models.model import skeleton, transformers_config
from trainctl.train.models.weights import CHUNK, SafetensorsWeights, SeedWeights

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
    made = skeleton(model, torch.float32)
    source = SeedWeights.of(model, made, 1)
    ours = dict(made.named_parameters())
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
    model = skeleton(ModelConfig(num_layers=1), torch.float32)
    tensors = {n: torch.rand(p.shape) for n, p in model.named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsWeights(tmp_path, model)
    for name, start, end in (("model.embed_tokens.weight", 5, 1019), ("model.norm.weight", 1, 3)):
        whole = tensors[name].reshape(-1)
        assert torch.equal(source.read(name, tensors[name].shape, start, end), whole[start:end])

    def refused(changes, match):
        left = {n: t for n, t in (tensors | changes).items() if t is not None}
        save_file(left, tmp_path / "model.safetensors")
        with pytest.raises(TrainctlError, match=match):
            SafetensorsWeights(tmp_path, model)

    refused({"model.norm.weight": None}, r"has no tensor model\.norm\.weight")
    refused({"model.norm.weight": torch.ones(7)}, r"shape \[7\]")
    with pytest.raises(TrainctlError, match="has neither"):
        SafetensorsWeights(tmp_path / "nowhere", model)
