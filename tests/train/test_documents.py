"""Packed documents do not see each other, or a run that needs it does not start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from anatomies import read_directory
from rank_processes import tiny_config
from transformers import AutoConfig

from trainctl.config.schema import AttentionKind, ModelConfig
from trainctl.hardware import resolve_hardware
from trainctl.options.model import families
from trainctl.rules.resolve import resolve
from trainctl.train.models.anatomy import anatomy, joined_attentions, supported_attentions
from trainctl.train.models.model import materialise, skeleton
from trainctl.train.models.weights import SeedWeights

SHAPE = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
WITHOUT_POSITIONS = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "afmoe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "falcon": {"head_dim": None},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "head_dim": None},
    "bloom": {"head_dim": None},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "head_dim": None, "hidden_size": None},
}
"""Architectures whose code gives the mask no positions, with settings beside `SHAPE`."""
SCRIPTS = Path(__file__).parents[2] / "scripts"
SAMPLE = ("gpt2", "gpt_oss", "opt", "lfm2")
ALL = ("sdpa", "eager", "flash_attention_2")
JOINED = {
    "llama": ({}, ()),
    "gpt_oss": (WITHOUT_POSITIONS["gpt_oss"], ()),
    # its own attention asks FlashAttention for no documents
    "falcon": (WITHOUT_POSITIONS["falcon"], ("flash_attention_2",)),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, ALL),
    "granitemoehybrid": ({"layer_types": ["full_attention"] * 2, "num_local_experts": 0}, ()),
}
"""Attentions with which documents see each other, by architecture and settings."""


def directory(folder: Path, kind: str, settings: dict) -> ModelConfig:
    known = {key: value for key, value in {**SHAPE, **settings}.items() if value is not None}
    AutoConfig.for_model(kind, **known).save_pretrained(folder)
    return ModelConfig(name="hf", family="hf", path=str(folder))


@pytest.mark.parametrize("kind", WITHOUT_POSITIONS)
def test_a_document_in_a_row_is_computed_as_one_by_itself(kind: str, tmp_path: Path) -> None:
    model = directory(tmp_path, kind, WITHOUT_POSITIONS[kind])
    if kind in ("gpt_oss", "bloom", "mpt"):  # have no sdpa
        model.attention = AttentionKind.eager
    built = skeleton(model, torch.float32).eval()
    materialise(built, SeedWeights(0, std=0.2), torch.device("cpu"))
    row = torch.randint(1, 250, (1, 20), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    with torch.no_grad():
        packed = built(input_ids=row, position_ids=positions, use_cache=False).logits[:, 8:]
        alone = built(input_ids=row[:, 8:], use_cache=False).logits
        unmasked = built(input_ids=row, use_cache=False).logits[:, 8:]
    assert torch.allclose(packed, alone, atol=1e-4 * alone.std())
    assert not torch.allclose(unmasked, alone, atol=1e-2 * alone.std())  # it can be seen


@pytest.mark.parametrize("kind", JOINED)
def test_an_anatomy_says_with_which_attention_documents_see_each_other(
    kind: str, tmp_path: Path
) -> None:
    settings, joined = JOINED[kind]
    read = anatomy(directory(tmp_path, kind, settings))
    assert read.joined_attentions == joined


def test_a_run_whose_model_cannot_keep_documents_apart_does_not_start(tmp_path: Path) -> None:
    config = tiny_config(steps=1)
    config.model = read_directory(directory(tmp_path, "lfm2", JOINED["lfm2"][0]))
    config.data.mask_documents = True
    hardware = resolve_hardware(config.hardware)
    (found,) = [item for item in resolve(config, hardware).findings if item.is_error]
    assert (found.rule, found.hint) == ("TC370", "data.mask_documents=false")
    config.data.mask_documents = False
    assert resolve(config, hardware).plan is not None


@pytest.mark.parametrize("family", [spec.name for spec in families()])
def test_families_with_a_closed_form_keep_documents_apart(family: str) -> None:
    model = ModelConfig(family=family, head_dim=None if family == "gpt2" else 32, vocab_size=300)
    built = skeleton(model, torch.bfloat16)
    assert joined_attentions(built, supported_attentions(type(built)), 1) == ()


def test_the_page_has_the_table_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    import document_masks

    assert document_masks.main(["--check"]) == 0
    rows = {row["model_type"]: row for row in document_masks.rows()}
    assert {name: document_masks.measured(name) for name in SAMPLE} == {
        name: rows[name] for name in SAMPLE
    }


@pytest.mark.slow
def test_every_decoder_of_transformers_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    import document_masks

    assert {row["model_type"] for row in document_masks.rows()} == set(document_masks.decoders())
