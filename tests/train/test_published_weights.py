"""Any architecture: what transformers saves, trainctl reads and exports, and transformers loads.

In one process, as a rank does it; that ranks train from such weights is in `test_architectures`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, made, of_directory
from rank_processes import tiny_config
from safetensors.torch import load_file, save_file
from tensor_files import write_tensors
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.registry import new_section
from trainctl.config.schema import ModelConfig, RunConfig
from trainctl.engines.shards import Shard, read_shard
from trainctl.errors import TrainctlError
from trainctl.models.hf_weights import persistent_buffers
from trainctl.plans.identity import model_description
from trainctl.plans.optimizers import parameter_groups as plan_groups
from trainctl.runs.manifest import FORMAT, write_manifest
from trainctl.train.export.directory import export
from trainctl.train.models.anatomy import anatomy
from trainctl.train.models.model import materialise, skeleton, whole_pieces
from trainctl.train.models.weights import SafetensorsWeights, SeedWeights, parameter_initializers
from trainctl.train.optimizers import parameter_groups as rank_groups

CPU = torch.device("cpu")
FUSED = "model.layers.1.mlp.experts.gate_up_proj"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def checkpoint_of(folder: Path, model: PreTrainedModel, config: ModelConfig) -> Path:
    """Write a weights-only checkpoint of one rank, and return its folder."""
    folder.mkdir(parents=True)
    named = dict(model.named_parameters())
    buffers = {f"buffer/{item.name}": item for item in persistent_buffers(model)}
    tensors = {f"master/{n}": p.detach().float().reshape(-1) for n, p in enumerate(named.values())}
    tensors |= {key: item.tensor.reshape(-1) for key, item in buffers.items()}
    size, digest = write_tensors(folder / "rank-00000.safetensors", tensors)
    file = "rank-00000.safetensors"
    shapes = {name: list(parameter.shape) for name, parameter in named.items()}
    write_manifest(
        folder,
        {
            "format": FORMAT,
            "run": "",
            "model": model_description(config, shapes),
            "weights_only": False,
            **dict.fromkeys(("step", "samples", "tokens"), 1),
            "metrics": {},
            "corpus_digest": "",
            "shapes": shapes,
            "states": ["master"],
            "scalars": {},
            "files": [{"name": file, "bytes": size, "sha256": digest}],
            "fragments": [
                {
                    "parameter": name,
                    "start": 0,
                    "numel": parameter.numel(),
                    "file": file,
                    "tensor": number,
                    "offset": 0,
                }
                for number, (name, parameter) in enumerate(named.items())
            ],
            "buffers": [
                {"name": item.name, "file": file, "key": key, "numel": item.tensor.numel()}
                for key, item in buffers.items()
            ],
        },
    )
    return folder


def configured(model: ModelConfig) -> RunConfig:
    config = tiny_config()
    config.model = model
    return config


def logits(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(ids).logits


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_what_transformers_saves_is_read_and_what_is_exported_is_loaded(kind, tmp_path):
    theirs = made(kind)
    theirs.save_pretrained(tmp_path / "from")
    config = of_directory(tmp_path / "from", kind)
    ours = skeleton(config, torch.float32)
    laws = parameter_initializers(ours)
    assert set(laws) == {name for name, _ in ours.named_parameters()}
    materialise(ours, SafetensorsWeights(tmp_path / "from", ours), CPU)
    assert float((logits(ours) - logits(theirs)).abs().max()) <= 1e-6
    with torch.no_grad():  # a step of a kind
        for parameter in ours.parameters():
            parameter.mul_(1.01)
        for buffer in persistent_buffers(ours):
            buffer.tensor.add_(0.1)
    saved = checkpoint_of(tmp_path / "checkpoint", ours, config)
    export(configured(config), saved, tmp_path / "out", dtype=torch.float32)
    stored = load_file(tmp_path / "from/model.safetensors")
    written = load_file(tmp_path / "out/model.safetensors")
    assert {k: v.shape for k, v in written.items()} == {k: v.shape for k, v in stored.items()}
    back, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        dtype=torch.float32,
        attn_implementation=config.attention.value,
        output_loading_info=True,
    )
    assert not any(report[part] for part in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert float((logits(back) - logits(ours)).abs().max()) <= 1e-5


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_plan_and_rank_have_the_same_groups(kind, tmp_path):
    """Norms, biases (of all experts too) and embeddings undecayed, whatever they are called."""
    made(kind).config.save_pretrained(tmp_path)
    config = configured(of_directory(tmp_path, kind))
    if not config.model.has_closed_form:
        config.model.anatomy = anatomy(config.model).to_table()
    config.optimizer = new_section("optimizer", "muon")
    pieces = whole_pieces(skeleton(config.model, torch.float32))
    names = {parameter: piece.name for parameter, piece in pieces.items()}
    on_rank = {
        group["name"]: {names[parameter] for parameter in group["params"]}
        for group in rank_groups(pieces, config)
    }
    planned = {group.name: set(group.parameters) for group in plan_groups(config)}
    assert on_rank == planned
    spared = {
        piece.name
        for piece in pieces.values()
        if len(piece.shape) < 2 or piece.name.endswith("bias") or piece.is_embedding
    }
    assert on_rank["undecayed"] - spared <= {"lm_head.weight"}
    assert not spared & on_rank.get("decayed", set()) and not spared & on_rank["muon"]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_parameter_starts_as_transformers_starts_it(kind, tmp_path):
    theirs = made(kind)
    theirs.config.save_pretrained(tmp_path)
    config = of_directory(tmp_path, kind)
    ours = skeleton(config, torch.float32)
    source = SeedWeights.of(config, ours, 3)
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        values = source.read(name, parameter.shape, 0, parameter.numel())
        other = expected[name].detach().reshape(-1)
        if float(other.std(correction=0)) == 0:
            assert torch.equal(values, other), name
        else:
            spread = 4 / (2 * parameter.numel()) ** 0.5
            ratio = float(values.std(correction=0) / other.std(correction=0))
            assert abs(ratio - 1) < 2 * spread, (name, ratio)
        middle = parameter.numel() // 3
        one = source.read(name, parameter.shape, middle, middle + 1)
        assert torch.equal(one, values[middle : middle + 1]), name


def test_a_range_of_experts_is_read_from_their_own_files_alone(tmp_path):
    theirs = made("mixtral")
    theirs.save_pretrained(tmp_path)
    model = skeleton(of_directory(tmp_path, "mixtral"), torch.float32)
    source = SafetensorsWeights(tmp_path, model)
    whole = dict(theirs.named_parameters())[FUSED].detach()
    read, fetched = source._whole, []
    source._whole = lambda name: fetched.append(name) or read(name)
    size = whole[0].numel()
    part = source.read(FUSED, whole.shape, size + 5, 3 * size - 7)
    assert torch.equal(part, whole.reshape(-1)[size + 5 : 3 * size - 7])
    assert sorted(fetched) == [
        f"model.layers.1.block_sparse_moe.experts.{expert}.{part}.weight"
        for expert in (1, 2)
        for part in ("w1", "w3")
    ]
    shard, _ = Shard.split(whole.shape, dim=1, index=1, count=2, fused=2)
    mine = read_shard(
        lambda start, end: source.read(FUSED, whole.shape, start, end), shard, 0, whole.numel() // 2
    )
    halves = [part.chunk(2, dim=1)[1] for part in whole.chunk(2, dim=1)]  # of gate, and of up
    assert torch.equal(mine.view(4, -1, 32), torch.cat(halves, 1))


def test_wrong_files_are_reported_with_the_tensor_and_its_file(tmp_path):
    made("mixtral").save_pretrained(tmp_path / "good")
    file = "model.safetensors"
    tensors = load_file(tmp_path / "good" / file)
    one = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    cases = {
        "has no tensor model.norm.weight": {"model.norm.weight": None},
        f"{FUSED} cannot be made of": {one: None},
        f"model.norm.weight in {file}, has shape [31]": {"model.norm.weight": torch.ones(31)},
        "cannot be made": {one: tensors[one][:, :-1].clone()},
        f"quantised weights are not read: {one} in U8": {one: tensors[one].to(torch.uint8)},
    }
    for number, (words, change) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", folder)
        changed = {k: v for k, v in (tensors | change).items() if v is not None}
        save_file(changed, folder / file)
        model = skeleton(of_directory(folder, "mixtral"), torch.float32)
        with pytest.raises(TrainctlError) as caught:
            SafetensorsWeights(folder, model)
        assert words in caught.value.message, caught.value.message


def test_what_a_directory_says_of_buffers_is_kept_in_fp32(tmp_path):
    theirs = made("deepseek_v3")
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "from")
    config = of_directory(tmp_path / "from", "deepseek_v3")
    ours = skeleton(config, torch.bfloat16)
    materialise(ours, SafetensorsWeights(tmp_path / "from", ours), CPU)
    (buffer,) = persistent_buffers(ours)
    assert buffer.name == BIAS and buffer.tensor.dtype == torch.float32
    assert torch.equal(buffer.tensor, theirs.state_dict()[BIAS].float())
    saved = checkpoint_of(tmp_path / "checkpoint", ours, config)
    export(configured(config), saved, tmp_path / "out", dtype=torch.bfloat16)
    assert load_file(tmp_path / "out/model.safetensors")[BIAS].dtype == torch.float32
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest = {k: v for k, v in manifest.items() if k not in ("buffers", "sha256")}
    write_manifest(saved, manifest)  # as an older version wrote it
    export(configured(config), saved, tmp_path / "old", dtype=torch.float32)
    assert not load_file(tmp_path / "old/model.safetensors")[BIAS].any()
