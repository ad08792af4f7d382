"""The model skeleton: true shapes without memory, and attention that keeps to its document."""

import pytest
import torch
import torch.nn.functional as F
from anatomies import read_directory
from transformers import LlamaConfig, modeling_flash_attention_utils

from trainctl.config.schema import (
    ModelConfig,
)
from trainctl.engines.micro_batch import MicroBatch, SequencePart
from trainctl.errors import TrainctlError
from trainctl.train.models.model import materialise, require_all_to_train, skeleton
from trainctl.train.models.varlen import has_flash_attention
from trainctl.train.models.weights import SeedWeights

FAMILIES = ["llama", "mistral", "qwen3", "gpt2"]


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


def attend(query, key, value, softmax_scale=None, **_):
    """FlashAttention's function of whole samples, (samples, length, heads, width)."""
    heads = query.shape[2] // key.shape[2]
    query, key, value = (
        each.transpose(1, 2).repeat_interleave(times, dim=1)
        for each, times in ((query, 1), (key, heads), (value, heads))
    )
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=softmax_scale)
    return mixed.transpose(1, 2)


def attend_by_lengths(query, key, value, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, **options):
    """Replace flash attention of variable lengths, on packed (tokens, heads, width) tensors."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k) and cu_seqlens_q.dtype == torch.int32
    lengths = cu_seqlens_q.diff().tolist()
    assert max_seqlen_q == max(lengths)
    documents = zip(*(each.split(lengths) for each in (query, key, value)), strict=True)
    return torch.cat([attend(*(part[None] for part in parts), **options)[0] for parts in documents])


@pytest.mark.parametrize("family", FAMILIES)
def test_flash_attention_keeps_to_the_documents_of_every_sample(family, monkeypatch):
    """The model takes transformers' path to the package, which only GPU machines have."""
    functions = (attend, attend_by_lengths, None, None, None)
    monkeypatch.setattr(
        modeling_flash_attention_utils,
        "lazy_import_flash_attention",
        lambda *_, **__: (functions, (lambda **given: given, None)),
    )
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.stack([torch.cat([torch.arange(5), torch.arange(7)]), torch.arange(12)])
    batch = MicroBatch(ids, ids, positions, positions, torch.arange(2), is_masked=True)
    model = built(family).double()  # fp32 would be taken for a mistake of somebody's
    device = torch.device("cpu")
    with torch.no_grad():
        expected = model(**batch.model_inputs(device)).logits
        model.config._attn_implementation = "flash_attention_2"
        assert has_flash_attention(model)
        found = model(**batch.model_inputs(device, flash_attention=True)).logits
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_llama_directory_drops_attention_as_its_config_says(share, tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    LlamaConfig(**sizes, num_attention_heads=4, attention_dropout=share).save_pretrained(tmp_path)
    shape = read_directory(ModelConfig(family="hf", path=str(tmp_path)))
    assert shape.family == ("hf" if share else "llama")
    model = skeleton(shape, torch.float32)
    materialise(model, SeedWeights(3, std=0.3), torch.device("cpu"))
    ids = torch.arange(12)[None]

    def logits():
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits

    assert torch.equal(logits(), logits()) == (share == 0)
    model.eval()
    assert torch.equal(logits(), logits())


def test_a_part_of_a_sequence_tells_flash_attention_of_the_whole():
    ids = torch.zeros(2, 8, dtype=torch.long)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 0]])
    batch = MicroBatch(ids, ids, positions, positions, torch.arange(2), is_masked=True)
    inputs = batch.model_inputs(torch.device("cpu"), part=SequencePart(1, 2), flash_attention=True)
    assert inputs["position_ids"].tolist() == positions[:, 4:].tolist()
    assert inputs["cu_seq_lens_q"].tolist() == [0, 3, 8, 15, 16]
    assert inputs["max_length_k"] == 7


def test_parameters_that_do_not_train_are_named_and_refused():
    """DeepSpeed's optimizers leave them out, and so did checkpoints, which could not be read."""
    model = skeleton(ModelConfig(), torch.float32)
    require_all_to_train(model)
    model.get_input_embeddings().requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(False)
    with pytest.raises(TrainctlError, match=r"embed_tokens\.weight and 3 more"):
        require_all_to_train(model)
