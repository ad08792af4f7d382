"""Models traced on fake tensors: `estimate-memory --exact`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from anatomies import read_directory

from trainctl.cli.main import run
from trainctl.config.schema import Accelerator, AttentionKind, DataType, ModelConfig, RunConfig
from trainctl.errors import ExitCode, TrainctlError
from trainctl.hardware import Hardware
from trainctl.memory.activations import block_activations
from trainctl.memory.traced import TracedModel, on_tensor_rank
from trainctl.plan.resolve import resolve
from trainctl.plan.shapes import count_parameters

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
    """A transformers directory of another architecture."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **(SHAPE | changes))
    config.save_pretrained(folder)
    return read_directory(ModelConfig(name="hf", family="hf", path=str(folder)))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gpt2"])
def test_the_closed_form_is_what_a_trace_finds(family: str, attention: str, tmp_path: Path) -> None:
    from trainctl.train.trace import trace

    model = _ours(family, attention)
    for compute, autocast, element in (("bf16", False, 2), ("fp32", False, 4), ("bf16", True, 2)):
        traced = trace(_config(model, compute, autocast=autocast), tmp_path)
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
    ],
)
def test_other_architectures_are_traced_as_autograd_finds_them(kind: str, tmp_path: Path) -> None:
    """Against real tensors, in a real forward pass of the whole model."""
    import torch
    import transformers

    from trainctl.train.model import blocks
    from trainctl.train.trace import trace

    # phi3's default padding token lies outside a small vocabulary.
    model = _directory(tmp_path, kind, pad_token_id=0)
    traced = trace(_config(model), tmp_path)
    real = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path), dtype=torch.bfloat16
    ).train()
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
    from trainctl.train.trace import trace

    latent = {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 32}
    latent |= {"qk_nope_head_dim": 24, "num_key_value_heads": 8, "first_k_dense_replace": 3}
    for kind, changes in (("phi3", {"pad_token_id": 0}), ("deepseek_v3", latent)):
        traced = trace(_config(_directory(tmp_path / kind, kind, **changes)), tmp_path)
        whole, half = traced.block, on_tensor_rank(traced, 2)
        assert on_tensor_rank(traced, 1) == whole
        assert (half.norms, half.boundary) == (whole.norms, whole.boundary)
        assert half.feed_forward == pytest.approx(whole.feed_forward / 2, abs=1)
        share = 2 if kind == "phi3" else 1
        assert half.attention == pytest.approx(whole.attention / share, abs=1)
        assert whole.products / 2 < half.products < whole.products
        assert half.feed_forward_gradient < whole.feed_forward_gradient


def test_experts_are_traced_in_every_format(tmp_path: Path) -> None:
    """torch's grouped product has shapes for fake tensors in bf16 only."""
    from trainctl.train.trace import trace

    model = _directory(tmp_path, "mixtral")
    in_bf16 = trace(_config(model), tmp_path)
    in_fp16 = trace(_config(model, "fp16"), tmp_path)
    assert in_fp16.anatomy.to_table() == in_bf16.anatomy.to_table()
    assert in_fp16.block.saved == pytest.approx(in_bf16.block.saved, rel=0.01)
    in_fp32 = trace(_config(model, "fp32"), tmp_path)
    assert 1.5 * in_bf16.block.saved < in_fp32.block.saved < 2 * in_bf16.block.saved
    mixed = trace(_config(model, "bf16", autocast=True), tmp_path)
    assert in_bf16.block.saved < mixed.block.saved < in_fp32.block.saved


def test_a_directory_is_budgeted_as_what_its_code_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a process of its own, once; never as a Llama of that shape, which has one expert."""
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
    monkeypatch.setattr("trainctl.config.tracing._known", {})
    monkeypatch.setattr(
        "trainctl.config.tracing._ask_process", lambda *_: pytest.fail("asked again")
    )
    assert run(["estimate-memory", *arguments, "--exact"]) == 0
    exact = json.loads(capsys.readouterr().out)
    report = exact.pop("traced")
    assert exact == found
    assert report["parameters"] == {"traced": count_parameters(model).total}


def test_blocks_of_one_kind_are_traced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first dense, the others sparse: as if each of them had been traced."""
    from trainctl.train import trace

    sparse = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 64}
    lora = {"q_lora_rank": 64, "kv_lora_rank": 32, "num_key_value_heads": 8}
    model = _directory(tmp_path, "deepseek_v3", first_k_dense_replace=1, **sparse, **lora)
    once = trace.trace(_config(model), tmp_path)
    monkeypatch.setattr(
        trace, "one_of_each_kind", lambda built: dict.fromkeys(trace.blocks(built), 1)
    )
    assert trace.trace(_config(model), tmp_path).block == once.block
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


def test_a_users_own_model_is_traced_from_the_folder_at_hand(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "def make(model):\n"
        "    config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=100,\n"
        "        num_hidden_layers=2, num_attention_heads=2, attention_bias=True)\n"
        "    return LlamaForCausalLM(config)\n"
    )
    words = ["recipe=tiny", "model.factory=mine:make", "--exact", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "trainctl", "estimate-memory", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    block = 4 * 64 * 64 + 3 * 64 + 64 + 3 * 64 * 100 + 2 * 64
    expected = 2 * 512 * 64 + 2 * block + 64
    assert json.loads(done.stdout)["traced"]["parameters"]["traced"] == expected


def test_a_model_that_cannot_be_traced_says_why(tmp_path: Path) -> None:
    from trainctl.train.trace import trace

    transformers = pytest.importorskip("transformers")
    bloom = transformers.AutoConfig.for_model("bloom", hidden_size=64, n_layer=2, n_head=4)
    bloom.save_pretrained(tmp_path / "bloom")
    model = _ours("llama")
    model = replace(model, family="hf", path=str(tmp_path / "bloom"))
    with pytest.raises(TrainctlError):  # it has no sdpa attention in transformers either
        trace(_config(model), tmp_path)
    gemma = _directory(tmp_path / "gemma", "gemma2")
    (found,) = (f for f in resolve(_config(gemma), CPUS).findings if f.key == "model.attention")
    assert found.rule == "TC153" and found.hint.startswith("model.attention=eager")
    eager = replace(gemma, attention=AttentionKind.eager)
    assert len(trace(_config(eager), tmp_path).anatomy.blocks) == 3
    broken = replace(_ours("llama"), factory="tests.nowhere:make")
    with pytest.raises(TrainctlError, match=r"model\.factory"):
        trace(_config(broken), tmp_path)


def test_a_directory_whose_code_fails_is_refused_before_a_launch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the process that traces it; today's rank would end with exit code 6."""
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
    arguments = ["recipe=70b-zero3-nodes", "parallelism.tensor=4", "--json"]
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
