"""Shapes read from transformers directories, as transformers itself writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_model import SHAPE
from transformers import (
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

from trainctl.config.compose import compose, recompose
from trainctl.errors import TrainctlError

pytestmark = pytest.mark.usefixtures("nothing_is_traced")


def model_of(directory: Path, *overrides: str) -> Any:
    return compose(["model=hf", f"model.path={directory}", *overrides]).config.model


@pytest.mark.parametrize(
    ("make", "family"),
    [
        (LlamaConfig, "llama"),
        (MistralConfig, "mistral"),
        (Qwen3Config, "qwen3"),
        (Qwen2Config, "hf"),
    ],
)
def test_a_directory_of_transformers_gives_shape_and_family(
    tmp_path: Path, make: Any, family: str
) -> None:
    written = make(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    written.save_pretrained(tmp_path)
    model = model_of(tmp_path)
    assert model.family == family
    assert model.path == str(tmp_path)
    assert model.initial_weights is None
    assert model.name == tmp_path.name
    assert (model.vocab_size, model.hidden_size, model.intermediate_size) == (320, 64, 96)
    assert (model.num_layers, model.num_attention_heads, model.num_key_value_heads) == (3, 4, 2)
    assert model.rope_theta == 5e5
    assert model.norm_epsilon == written.rms_norm_eps
    assert model.max_position_embeddings == written.max_position_embeddings
    assert model.tie_word_embeddings == written.tie_word_embeddings
    assert model.sliding_window == getattr(written, "sliding_window", None)
    assert model.head_dim == getattr(written, "head_dim", None)


def test_a_window_of_0_tokens_is_none(tmp_path: Path) -> None:
    written = Qwen2MoeConfig(**SHAPE, use_sliding_window=False)
    assert written.sliding_window == 0  # as transformers writes it
    written.save_pretrained(tmp_path)
    assert model_of(tmp_path).sliding_window is None


def test_a_window_that_is_off_is_none(tmp_path: Path) -> None:
    window = {"sliding_window": 32, "max_window_layers": 2}
    for is_on in (False, True):
        written = {"model_type": "qwen2", **SHAPE, **window, "use_sliding_window": is_on}
        (tmp_path / "config.json").write_text(json.dumps(written))
        assert model_of(tmp_path).sliding_window == (32 if is_on else None)


def test_gpt2_has_names_of_its_own(tmp_path: Path) -> None:
    GPT2Config(n_embd=48, n_layer=2, n_head=3, n_positions=77, vocab_size=99).save_pretrained(
        tmp_path
    )
    model = model_of(tmp_path)
    assert model.family == "gpt2"
    assert (model.hidden_size, model.intermediate_size, model.num_layers) == (48, 192, 2)
    assert (model.num_attention_heads, model.max_position_embeddings) == (3, 77)
    assert model.tie_word_embeddings is True


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"attention_dropout": 0.1},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"hidden_act": "gelu"},
        {"model_type": "other"},
    ],
)
def test_a_variant_that_we_cannot_build_stays_hf(tmp_path: Path, changes: dict[str, Any]) -> None:
    written = {"model_type": "llama", **SHAPE, **changes}
    (tmp_path / "config.json").write_text(json.dumps(written))
    model = model_of(tmp_path)
    assert model.family == "hf"
    assert model.hidden_size == 64


def test_what_is_set_explicitly_wins_with_a_warning(tmp_path: Path) -> None:
    LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    composed = compose(["model=hf", f"model.path={tmp_path}", "model.num_layers=1"])
    assert composed.config.model.num_layers == 1
    assert composed.config.model.family == "llama"
    (found,) = composed.findings
    assert (found.key, found.source) == ("model.num_layers", "model.num_layers=1")
    assert "1 replaces 3" in found.message
    sources = [layer.source for layer in composed.layers["model.num_layers"]]
    assert sources == [f"{tmp_path}/config.json", "model.num_layers=1"]
    assert composed.source_of("model.hidden_size") == f"{tmp_path}/config.json"


def test_a_resume_does_not_read_the_directory_again(tmp_path: Path) -> None:
    LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    saved = compose(["model=hf", f"model.path={tmp_path}"]).config
    (tmp_path / "config.json").unlink()
    again = recompose(saved, ["training.steps=3"])
    assert again.config.model == saved.model
    assert again.findings == ()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no config.json"),
        ("{", "not valid JSON"),
        ("[1]", "no JSON object"),
        ("{}", "lacks vocab_size, hidden_size, num_hidden_layers, num_attention_heads"),
        (json.dumps({**SHAPE, "hidden_size": "many"}), "hidden_size is unusable"),
        (json.dumps({**SHAPE, "num_attention_heads": 0}), "num_attention_heads is unusable"),
        (
            json.dumps({**SHAPE, "architectures": ["LlamaForSequenceClassification"]}),
            "is of LlamaForSequenceClassification (architectures)",
        ),
        (
            json.dumps({"architectures": ["XForConditionalGeneration"], "vision_config": {}}),
            "is of a vision-language model (XForConditionalGeneration), by its vision_config",
        ),
        (
            json.dumps({**SHAPE, "rope_parameters": {"rope_type": "linear", "factor": 0}}),
            "rope_parameters.factor is unusable: 0 is no number above 0",
        ),
        (
            json.dumps(
                {**SHAPE, "rope_parameters": {"full_attention": {"short_factor": [1, "a"]}}}
            ),
            "rope_parameters.full_attention.short_factor is unusable: 'a'",
        ),
        (
            json.dumps({**SHAPE, "rope_scaling": {"low_freq_factor": 4, "high_freq_factor": 4}}),
            "rope_scaling has one value for low_freq_factor and high_freq_factor",
        ),
    ],
)
def test_an_unusable_directory_is_reported(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(TrainctlError) as caught:
        model_of(tmp_path)
    (found,) = caught.value.findings
    assert words in found.message
    assert found.source == f"model.path={tmp_path}"


@pytest.mark.parametrize(
    "classes",
    [["LlamaForCausalLM"], ["LlamaModel"], ["GPT2LMHeadModel"], None, [], "LlamaForCausalLM"],
)
def test_a_directory_with_or_without_the_head_of_a_language_model_is_taken(
    tmp_path: Path, classes: Any
) -> None:
    content = {"model_type": "llama", **SHAPE, "architectures": classes}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert model_of(tmp_path).family == "llama"


def test_a_missing_directory_is_reported() -> None:
    with pytest.raises(TrainctlError) as caught:
        model_of(Path("/nowhere/at/all"))
    assert "not a directory" in caught.value.findings[0].message
