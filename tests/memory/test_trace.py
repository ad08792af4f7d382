"""Models traced on fake tensors: `estimate-memory --exact`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from anatomies import read_directory

from trainctl.cli.main import run
from trainctl.config.compose import compose, recompose
from trainctl.config.schema import Accelerator, AttentionKind, DataType, ModelConfig, RunConfig
from trainctl.errors import ExitCode, TrainctlError
from trainctl.hardware import Hardware
from trainctl.launchers.planning import plan_config
from trainctl.memory.activations import block_activations
from trainctl.memory.traced import TracedModel, block_on_tensor_rank
from trainctl.plans.optimizers import parameter_groups
from trainctl.plans.shapes import count_parameters
from trainctl.rules.resolve import resolve
from trainctl.train.models.anatomy import anatomy
from trainctl.train.models.model import blocks

pytestmark = pytest.mark.usefixtures("preloaded")

CPUS = Hardware(name="2xcpu", accelerator=Accelerator.cpu, nodes=1, devices_per_node=2)
SEQUENCE = 128
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def _config(model: ModelConfig, compute: str = "bf16", *, autocast: bool = False) -> RunConfig:
    config = RunConfig(model=model)
    config.precision.compute = DataType(compute)
    config.precision.autocast = autocast
    config.training.sequence_length = SEQUENCE
    return config


def _ours(family: str, attention: str = "sdpa") -> ModelConfig:
    return ModelConfig(
        family=family,
        hidden_size=256,
        intermediate_size=704,
        num_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=None if family == "gpt2" else 32,
        attention=AttentionKind(attention),
        tie_word_embeddings=family == "gpt2",
    )


def _directory(folder: Path, kind: str, **changes: int) -> ModelConfig:
    """Write a transformers directory of another architecture, and return its model section."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **(SHAPE | changes))
    config.save_pretrained(folder)
    return read_directory(ModelConfig(name="hf", family="hf", path=str(folder)))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gpt2"])
def test_the_closed_form_is_what_a_trace_finds(family: str, attention: str, tmp_path: Path) -> None:
    from trainctl.train.models.trace import trace

    model = _ours(family, attention)
    for compute, autocast, element in (("bf16", False, 2), ("fp32", False, 4), ("bf16", True, 2)):
        traced = trace(_config(model, compute, autocast=autocast))
        closed = block_activations(
            model, sequence_length=SEQUENCE, element=element, autocast=autocast
        )
        assert traced.block.saved == pytest.approx(closed.saved, rel=0.001), (compute, autocast)
        assert traced.block.products == closed.products
        assert traced.block.boundary == closed.boundary
        assert traced.anatomy.total == count_parameters(model).total
        assert len(traced.anatomy.blocks) == 3


@pytest.mark.parametrize(
    "kind",
    [
        "phi3",
        "gemma",
        "olmo2",
        "mixtral",
        "opt",
        "gpt_neox",
        "stablelm",
        "starcoder2",
        "cohere",
        "glm",
        "bert",
        "modernbert",
    ],
)
def test_other_architectures_are_traced_as_autograd_finds_them(kind: str, tmp_path: Path) -> None:
    """Against real tensors, in a real forward pass of the whole model."""
    import torch
    import transformers

    from trainctl.train.models.encoders import auto_class
    from trainctl.train.models.model import blocks
    from trainctl.train.models.trace import trace

    # phi3's default padding token lies outside a small vocabulary.
    model = _directory(tmp_path, kind, pad_token_id=0)
    traced = trace(_config(model))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    real = auto_class(config).from_config(config, dtype=torch.bfloat16).train()
    assert traced.anatomy.total == sum(tensor.numel() for tensor in real.parameters())

    weights = {tensor.untyped_storage().data_ptr() for tensor in real.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}
    inside = [False]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if inside[0] and storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    def enter(block: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        inside[0] = True
        for value in kwargs.get("position_embeddings", ()):
            weights.add(value.untyped_storage().data_ptr())

    def leave(*_: object) -> None:
        inside[0] = False

    for block in blocks(real):
        block.register_forward_pre_hook(enter, with_kwargs=True)
        block.register_forward_hook(leave)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # Kept until the sizes are read: what is freed may lend its address to another.
        output = real(torch.zeros(1, SEQUENCE, dtype=torch.long), use_cache=False)
    total = sum(storage.nbytes() for storage in saved.values())
    assert output.logits.shape[1] == SEQUENCE
    assert traced.block.saved * 3 * SEQUENCE == pytest.approx(total, rel=0.02)


def test_a_tensor_rank_keeps_what_its_share_of_the_weights_makes(tmp_path: Path) -> None:
    """Half of it all, or all of latent attention, which transformers leaves whole on each rank."""
    from trainctl.train.models.trace import trace

    latent = {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 32}
    latent |= {"qk_nope_head_dim": 24, "num_key_value_heads": 8, "first_k_dense_replace": 3}
    for kind, changes in (("phi3", {"pad_token_id": 0}), ("deepseek_v3", latent)):
        traced = trace(_config(_directory(tmp_path / kind, kind, **changes)))
        whole, half = traced.block, block_on_tensor_rank(traced, 2)
        assert block_on_tensor_rank(traced, 1) == whole
        assert (half.norms, half.boundary) == (whole.norms, whole.boundary)
        assert half.feed_forward == pytest.approx(whole.feed_forward / 2, abs=1)
        share = 2 if kind == "phi3" else 1
        assert half.attention == pytest.approx(whole.attention / share, abs=1)
        assert whole.products / 2 < half.products < whole.products
        assert half.feed_forward_gradient < whole.feed_forward_gradient


def test_experts_are_traced_in_every_format(tmp_path: Path) -> None:
    """torch's grouped product has shapes for fake tensors in bf16 only."""
    from trainctl.train.models.trace import trace

    model = _directory(tmp_path, "mixtral")
    in_bf16 = trace(_config(model))
    in_fp16 = trace(_config(model, "fp16"))
    assert in_fp16.anatomy.to_table() == in_bf16.anatomy.to_table()
    assert in_fp16.block.saved == pytest.approx(in_bf16.block.saved, rel=0.01)
    in_fp32 = trace(_config(model, "fp32"))
    assert 1.5 * in_bf16.block.saved < in_fp32.block.saved < 2 * in_bf16.block.saved
    mixed = trace(_config(model, "bf16", autocast=True))
    assert in_bf16.block.saved < mixed.block.saved < in_fp32.block.saved


def test_a_directory_is_budgeted_as_what_its_code_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A separate process traces the model once. A Llama of the same shape would have one expert."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = _directory(tmp_path / "mixtral", "mixtral")
    arguments = ["recipe=tiny", "model=hf", "model.path=mixtral", "--json"]
    arguments += ["tokenizer=byte", "precision=bf16", "training.sequence_length=128"]
    assert run(["estimate-memory", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not any("Llama" in note for note in found["notes"])
    kept = [json.loads(p.read_text())["found"] for p in tmp_path.glob("cache/trainctl/traces/*")]
    assert sorted(kept, key=str)[0] == model.anatomy and len(kept) == 2

    # Later commands read what was found: with nothing to trace by, they say the same.
    monkeypatch.setattr("trainctl.models.tracing._known", {})
    monkeypatch.setattr(
        "trainctl.models.tracing._ask_process", lambda *_: pytest.fail("asked again")
    )
    assert run(["estimate-memory", *arguments, "--exact"]) == 0
    exact = json.loads(capsys.readouterr().out)
    report = exact.pop("traced")
    assert exact == found
    assert report["parameters"] == {"traced": count_parameters(model).total}


def test_blocks_of_one_kind_are_traced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block is dense, the others are sparse; the result is as if each were traced."""
    from trainctl.train.models import trace

    sparse = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 64}
    lora = {"q_lora_rank": 64, "kv_lora_rank": 32, "num_key_value_heads": 8}
    model = _directory(tmp_path, "deepseek_v3", first_k_dense_replace=1, **sparse, **lora)
    once = trace.trace(_config(model))
    monkeypatch.setattr(
        trace, "skip_duplicate_blocks", lambda built: dict.fromkeys(blocks(built), 1)
    )
    assert trace.trace(_config(model)).block == once.block
    assert [block.experts for block in once.anatomy.blocks] == [0, 8, 8]
    again = TracedModel.from_json(json.loads(json.dumps(once.to_json())))
    assert again.to_json() == once.to_json()


def test_exact_of_a_known_family_is_the_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["estimate-memory", "recipe=tiny", "--json"]
    assert run(arguments) == 0
    closed = json.loads(capsys.readouterr().out)
    assert run([*arguments, "--exact"]) == 0
    exact = json.loads(capsys.readouterr().out)
    report = exact.pop("traced")
    assert exact == closed
    assert all(sizes["traced"] == sizes["closed_form"] for sizes in report.values())


OWN = """
from torch import nn
from transformers import (
    LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PretrainedConfig, PreTrainedModel
)
from transformers.modeling_outputs import CausalLMOutput

def config(width):
    return LlamaConfig(vocab_size=512, hidden_size=width, intermediate_size=100,
        num_hidden_layers=2, num_attention_heads=2, attention_bias=True)

def make(shape):
    return LlamaForCausalLM(config(64))

def halves(shape):
    return LlamaForCausalLM(config(shape.hidden_size // 2))

def classifier(shape):
    return LlamaForSequenceClassification(config(64))

def plain(shape):
    return nn.Linear(3, 3)

def by_values(shape):
    assert nn.Linear(3, 3).weight.sum() < 100
    return LlamaForCausalLM(config(64))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(48), nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(self, hidden):
        return hidden + self.down(self.up(self.norm(hidden)).relu())

class Bare(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed, self.out = nn.Embedding(300, 48), nn.Linear(48, 300, bias=False)
        self.layers = nn.ModuleList([Block(), Block(), Block()])
        self.post_init()

    def forward(self, input_ids, position_ids=None, use_cache=False):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return CausalLMOutput(logits=self.out(hidden))

def bare(shape):
    return Bare(PretrainedConfig())
"""
LLAMA_BLOCK = 4 * 64 * 64 + 4 * 64 + 3 * 64 * 100 + 2 * 64
BARE_BLOCK = 2 * 48 + 2 * 48 * 96 + 96 + 48


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "parameters", "decayed", "sizes"),
    [
        ("make", 2 * 512 * 64 + 2 * LLAMA_BLOCK - 2 * 64 + 64 + 2 * 64, None, (512, 64, 2)),
        ("bare", 2 * 300 * 48 + 3 * BARE_BLOCK, 300 * 48 + 3 * 2 * 48 * 96, (300, 48, 3)),
    ],
)
def test_plan_and_budget_count_what_a_function_makes(
    own: Path, name: str, parameters: int, decayed: int | None, sizes: tuple[int, ...]
) -> None:
    """Also of a class without transformers' blocks; found again from any other folder."""
    typed = "model.hidden_size=256"
    planned = plan_config(compose(["recipe=tiny", f"model.factory=mine:{name}", typed]))
    assert planned.errors == []
    (told,) = (each for each in planned.findings if each.key == "model.hidden_size")
    assert told.source == typed and f"which has {sizes[1]}" in told.message
    made = planned.assessment.plan
    assert made is not None and planned.assessment.budget is not None
    model = made.config.model
    assert (model.vocab_size, model.hidden_size, model.num_layers) == sizes
    assert count_parameters(model).total == parameters
    first, second = parameter_groups(made.config)
    assert first.elements + second.elements == parameters
    assert decayed in (None, first.elements)
    assert planned.assessment.budget.components.parameters == pytest.approx(4 * parameters, rel=0.1)
    saved = recompose(made.config, ["training.steps=3"])
    os.chdir("/")
    again = plan_config(saved)
    assert again.errors == [] and again.composed.config.model == model


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("classifier", r"LlamaForSequenceClassification gives logits of \[1, 2\] for 2 tokens"),
        ("halves", "makes another model when it is given the sizes"),
        ("by_values", "its code goes by values"),
    ],
)
def test_a_function_whose_model_is_not_known_says_why(
    own: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.syspath_prepend(own)
    with pytest.raises(TrainctlError, match=words) as caught:
        anatomy(ModelConfig(factory=f"mine:{name}"))
    assert f"mine:{name}" in caught.value.message
    sys.modules.pop("mine")


@pytest.mark.parametrize(
    ("name", "words"), [("plain", "mine:plain gave a Linear"), ("gone", "defines no gone")]
)
def test_a_function_whose_model_is_not_known_gets_no_numbers(
    own: Path, name: str, words: str
) -> None:
    planned = plan_config(compose(["recipe=tiny", f"model.factory=mine:{name}"]), with_files=True)
    (found,) = planned.errors
    assert found.key == "model.factory" and words in found.message
    assert planned.assessment.plan is planned.assessment.budget is None


def test_a_model_that_cannot_be_traced_says_why(tmp_path: Path) -> None:
    from trainctl.train.models.trace import trace

    transformers = pytest.importorskip("transformers")
    bloom = transformers.AutoConfig.for_model("bloom", hidden_size=64, n_layer=2, n_head=4)
    bloom.save_pretrained(tmp_path / "bloom")
    model = _ours("llama")
    model = replace(model, family="hf", path=str(tmp_path / "bloom"))
    with pytest.raises(TrainctlError):  # it has no sdpa attention in transformers either
        trace(_config(model))
    gemma = _directory(tmp_path / "gemma", "gemma2")
    (found,) = (f for f in resolve(_config(gemma), CPUS).findings if f.key == "model.attention")
    assert found.rule == "TC153" and found.hint.startswith("model.attention=eager")
    eager = replace(gemma, attention=AttentionKind.eager)
    assert len(trace(_config(eager)).anatomy.blocks) == 3
    broken = replace(_ours("llama"), factory="tests.nowhere:make")
    with pytest.raises(TrainctlError, match=r"model\.factory"):
        trace(_config(broken))


def test_a_directory_whose_code_fails_is_refused_before_a_launch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tracing process meets the error; on a rank it would end the run with exit code 6."""
    settings = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    shape = {"vocab_size": 300, **dict.fromkeys(("hidden_size", "num_hidden_layers"), 64)}
    content = json.dumps({**settings, **shape, "num_attention_heads": 2})
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "own.py").write_text("raise RuntimeError('not today')\n")
    words = ["recipe=tiny", "model=hf", f"model.path={tmp_path}", "model.trust_remote_code=true"]
    assert run(["validate", *words]) == ExitCode.bad_input
    told = capsys.readouterr().err
    assert "TC147" in told and "not today" in told
    assert f"{tmp_path}/config.json" in told


def test_tensor_ranks_share_a_traced_block_as_they_share_the_closed_form(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["recipe=70b-zero3-nodes", "parallelism.tensor=4", "kernels=plain", "--json"]
    arguments.insert(0, "estimate-memory")
    assert run(arguments) == 0
    closed = json.loads(capsys.readouterr().out)
    assert run([*arguments, "--exact"]) == 0
    exact = json.loads(capsys.readouterr().out)
    assert exact["phases"] == closed["phases"]


def test_a_trace_prints_no_warnings_of_the_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Processes that import: the libraries warn while they are imported.
    monkeypatch.delenv("TRAINCTL_TESTS_SERVER_OF")
    words = ["estimate-memory", "recipe=tiny", "--exact"]
    done = subprocess.run(
        [sys.executable, "-m", "trainctl", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
