"""The model skeleton: true shapes without memory, and attention that keeps to its document."""

import pytest
import torch

from trainctl.config.schema import (
    ModelConfig,
    ModelFamily,
)
from trainctl.train.build import materialise
from trainctl.train.model import skeleton
from trainctl.train.weights import SeedWeights

FAMILIES = [ModelFamily.llama, ModelFamily.mistral, ModelFamily.qwen3, ModelFamily.gpt2]


def small(family):
    return ModelConfig(
        family=family, vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2,
        num_key_value_heads=None, tie_word_embeddings=True,
    )  # fmt: skip


def built(family):
    model = skeleton(small(family), torch.float32)
    materialise(model, SeedWeights(3, std=0.3), torch.device("cpu"))
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_skeleton_holds_no_weights_and_a_built_model_shares_the_tied_ones(family):
    model = skeleton(small(family), torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    whole = built(family)
    assert whole.get_input_embeddings().weight is whole.get_output_embeddings().weight
    assert not any(p.is_meta for p in whole.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_that_start_anew_keep_attention_inside_a_document(family):
    model = built(family)
    ids = torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, :5] = (ids[0, :5] + 7) % 64
    plain = torch.arange(12)[None]
    masked = torch.cat([torch.arange(5), torch.arange(7)])[None]

    def second_document(tokens, positions):
        with torch.no_grad():
            return model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0, 5:]

    assert torch.equal(second_document(ids, masked), second_document(changed, masked))
    assert not torch.allclose(second_document(ids, plain), second_document(changed, plain))
