"""Torch's distributed checkpoints are read by ranges and refused when damaged."""

import itertools
import pickle
import random
from math import prod
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from trainctl.errors import TrainctlError
from trainctl.migration.checkpoints.dcp import ChunkedTensor, TensorChunk
from trainctl.migration.checkpoints.source import detect, open_source

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 40,
}


def model(kind=LlamaForCausalLM, **changes):
    configs = {LlamaForCausalLM: LlamaConfig, Qwen3ForCausalLM: Qwen3Config}
    torch.manual_seed(3)
    return kind(configs[kind](**{**SIZES, **changes}))


def moments(weights):
    """Return a state dict of an optimizer by name, with moments unlike the weights."""
    return {
        "state": {
            name: {"step": torch.tensor(5.0), "exp_avg": each * 2, "exp_avg_sq": each.square()}
            for name, each in weights.items()
        },
        "param_groups": [{"lr": 0.25, "betas": (0.9, 0.95), "eps": 1e-6, "params": list(weights)}],
    }


def save(folder, content):
    folder.mkdir()
    dcp.save(content, checkpoint_id=str(folder), no_dist=True)
    return folder


def whole(source, name, state, piece=7):
    numel = prod(source.shapes[name])
    parts = [
        source.read(name, state, start, min(start + piece, numel))
        for start in range(0, numel, piece)
    ]
    return torch.cat(parts).view(source.shapes[name])


def assert_holds(source, weights):
    """Check that a source has these weights, and the moments of `moments`."""
    assert set(source.shapes) == set(weights)
    for name, each in weights.items():
        assert torch.equal(whole(source, name, "master"), each), name
        assert torch.equal(whole(source, name, "exp_avg"), each * 2), name
        assert torch.equal(whole(source, name, "exp_avg_sq"), each.square()), name
    source.verify()


def parameters(made):
    return {name: each.detach().clone() for name, each in made.named_parameters()}


@pytest.mark.parametrize("prefix", ["", "model.", "app.model."])
def test_weights_are_found_under_any_prefix(tmp_path, prefix):
    made = model()
    weights = parameters(made)
    content = {prefix + name: each for name, each in weights.items()}
    path = save(tmp_path / "step-5", content | {"optim": moments(weights), "step": 5})
    assert detect(tmp_path) == "dcp"
    source = open_source(tmp_path)
    assert source.path == path
    source.use_model(made)
    assert_holds(source, weights)
    assert source.scalars == {"step": 5.0}
    assert (source.progress.step, source.progress.learning_rate) == (5, 0.25)
    assert source.hyperparameters == {"lr": 0.25, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-6}


def test_a_tied_weight_that_is_saved_twice_is_one(tmp_path):
    made = model(tie_word_embeddings=True)
    weights = parameters(made)
    save(tmp_path / "out", {"model": made.state_dict(), "optimizer": moments(weights)})
    source = open_source(tmp_path / "out")
    source.use_model(made)
    assert_holds(source, weights)


def test_tensors_that_the_model_lacks_are_kept_for_the_refusal(tmp_path):
    save(tmp_path / "out", {"model": parameters(model(num_hidden_layers=3))})
    source = open_source(tmp_path / "out")
    source.use_model(model())
    assert "model.layers.2.mlp.up_proj.weight" in source.shapes
    assert source.states == ("master",)


TITAN = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "layers",
}


def torchtitan_weights(weights, *, rotates_pairs, new):
    """Return weights as torchtitan has them: its names, and rows of q and k in pairs."""
    found = {}
    for name, each in weights.items():
        if rotates_pairs and ("q_proj" in name or "k_proj" in name):
            heads = each.shape[0] // SIZES["head_dim"]
            halves = each.view(heads, 2, SIZES["head_dim"] // 2, -1)
            each = torch.stack((halves[:, 0], halves[:, 1]), dim=2).reshape(each.shape)
        for theirs, ours in TITAN.items():
            name = name.replace(theirs, ours)
        if new:
            name = name.replace("output.", "lm_head.")
            name = name.replace("attention.w", "attention.qkv_linear.w").replace(
                "qkv_linear.wo", "wo"
            )
        found[name] = each.contiguous()
    return found


def with_fused_states(weights):
    """Return the weights, those of q, k and v joined as torchtitan holds them by default."""
    joined = {}
    for name, each in weights.items():
        if "qkv_linear" not in name:
            joined[name] = each
        elif ".wv." in name:
            parts = [weights[name.replace("wv", own)] for own in ("wq", "wk", "wv")]
            groups = [part.view(SIZES["num_key_value_heads"], -1, part.shape[1]) for part in parts]
            fused = torch.cat(groups, dim=1).flatten(0, 1)
            joined[name.replace("wv", "wqkv")] = fused
    return joined


@pytest.mark.parametrize("form", ["old", "new", "fused"])
@pytest.mark.parametrize("kind", [LlamaForCausalLM, Qwen3ForCausalLM])
def test_torchtitans_names_and_rows_become_those_of_transformers(tmp_path, kind, form):
    made = model(kind)
    weights = parameters(made)
    pairs = kind is LlamaForCausalLM
    theirs = torchtitan_weights(weights, rotates_pairs=pairs, new=form != "old")
    trained = with_fused_states(theirs) if form == "fused" else theirs
    flat = {}
    for name, states in moments(trained)["state"].items():
        flat |= {f"state.{name}.{state}": value for state, value in states.items()}
        flat |= {f"param_groups.{name}.lr": 0.5, f"param_groups.{name}.weight_decay": 0.1}
    train_state = {"step": torch.tensor(5), "ntokens_seen": torch.tensor(640)}
    extra = {"optimizer": flat, "train_state": train_state, "lr_scheduler": {"last_epoch": 5}}
    save(tmp_path / "step-5", theirs | extra)
    source = open_source(tmp_path)
    source.use_model(made)
    assert_holds(source, weights)
    assert (source.progress.step, source.progress.tokens) == (5, 640)
    assert source.hyperparameters == {"lr": 0.5, "weight_decay": 0.1}


def test_rows_in_pairs_rotate_as_halves_do():
    """Rotating neighbouring rows as complex numbers gives the same products as transformers."""
    query, key = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    angles = torch.outer(torch.arange(5.0), 0.5 ** torch.arange(8.0))
    turn = torch.polar(torch.ones_like(angles), angles)

    def by_pairs(values):
        pairs = torch.view_as_complex(values.view(2, 5, 8, 2))
        return torch.view_as_real(pairs * turn).flatten(2)

    def by_halves(values):
        first, second = values.view(2, 5, 8, 2).transpose(2, 3).reshape(2, 5, 16).chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    products = [turned(query) @ turned(key).transpose(1, 2) for turned in (by_pairs, by_halves)]
    torch.testing.assert_close(*products)


def test_a_tensor_of_another_torchtitan_model_is_named(tmp_path):
    made = model()
    theirs = torchtitan_weights(parameters(made), rotates_pairs=True, new=True)
    theirs["layers.0.moe.router.gate.weight"] = torch.ones(2, 2)
    save(tmp_path / "out", theirs)
    source = open_source(tmp_path / "out")
    with pytest.raises(TrainctlError, match=r"layers\.0\.moe\.router\.gate\.weight"):
        source.use_model(made)


def cut(size, generator):
    """Return the ends of parts of a dimension."""
    inner = sorted(generator.sample(range(1, size), generator.randint(0, min(2, size - 1))))
    return list(itertools.pairwise([0, *inner, size]))


@pytest.mark.parametrize("shape", [(7,), (5, 6), (4, 3, 5), (1, 9), (6, 1)])
def test_ranges_of_a_tensor_in_boxes(shape):
    generator = random.Random(str(shape))
    for _ in range(20):
        values = torch.arange(prod(shape)).view(shape)
        chunks = []
        for box in itertools.product(*(cut(size, generator) for size in shape)):
            part = values[tuple(slice(*ends) for ends in box)].reshape(-1)
            stored = SimpleNamespace(open=lambda p=part: SimpleNamespace(read=lambda a, b: p[a:b]))
            offsets, sizes = zip(*((low, high - low) for low, high in box), strict=True)
            chunks.append(TensorChunk(offsets, sizes, stored))
        tensor = ChunkedTensor(shape, chunks)
        start = generator.randrange(prod(shape))
        end = generator.randint(start + 1, prod(shape))
        assert torch.equal(tensor.read(start, end), values.view(-1)[start:end])
        assert torch.equal(tensor.read(), values.view(-1))


@pytest.fixture
def saved(tmp_path):
    weights = parameters(model())
    return save(tmp_path / "out", {"model": weights, "optimizer": moments(weights)})


def test_an_interrupted_save_is_refused(saved):
    (saved / ".metadata").unlink()
    with pytest.raises(TrainctlError, match="metadata"):
        open_source(saved, "dcp")


def test_a_missing_file_is_named(saved):
    (saved / "__0_0.distcp").unlink()
    with pytest.raises(TrainctlError, match=r"__0_0\.distcp: it is missing") as caught:
        open_source(saved)
    assert caught.value.exit_code == 5


def test_a_truncated_file_is_named(saved):
    file = saved / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(TrainctlError, match=r"__0_0\.distcp: it is truncated"):
        open_source(saved)


def test_a_changed_byte_is_found_after_reading(saved):
    file = saved / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    value = model().model.norm.weight.detach().numpy().tobytes()
    place = content.index(value)
    content[place] ^= 1
    file.write_bytes(content)
    source = open_source(saved)
    source.use_model(model())
    for name in source.shapes:
        for state in source.states:
            whole(source, name, state, piece=1000)
    with pytest.raises(TrainctlError, match=r"__0_0\.distcp: it is damaged"):
        source.verify()


class Harm:
    def __reduce__(self):
        return exec, ("raise SystemExit('the pickle ran code')",)


def test_metadata_that_would_run_code_is_refused(saved):
    (saved / ".metadata").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(TrainctlError, match=r"builtins\.exec"):
        open_source(saved)
