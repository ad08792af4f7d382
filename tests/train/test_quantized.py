"""Adapters beside a base in 8 or 4 bits: against bitsandbytes and PEFT, on layouts, exported."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from adapter_cases import Adapting, base_directory, config_of, train, train_all
from bitsandbytes.nn import Linear4bit
from fork_server import RanksFailed
from parity_cases import Difference
from rank_processes import Case, curve, tiny_plan, train_cases, with_stop
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from trainctl.config.registry import new_section
from trainctl.data.corpora import load_corpora
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.adapter import BaseWeights
from trainctl.plans.trainable import BLOCK, LORA_A, LinearLayer, packed_size
from trainctl.plans.types import RunPlan
from trainctl.runs import checkpoints
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import read_manifest
from trainctl.train.adapters import quantized
from trainctl.train.adapters.layers import initial_adapter
from trainctl.train.adapters.quantized import DequantizedWeights, QuantizedWeights, codec_of
from trainctl.train.data import TrainingData
from trainctl.train.export.adapter import export_adapter
from trainctl.train.export.directory import export
from trainctl.train.models.loaded import load
from trainctl.train.objectives.loss import summed_cross_entropy

STEPS = 6
KINDS = [kind for kind in BaseWeights if kind is not BaseWeights.compute]
LAYER = LinearLayer(name="layer", inputs=176, outputs=192)
"""Layer whose quantization blocks cross the ends of rows."""
WIDTH = 192
"""Width of the tiny model's feed-forward layer. On CPUs with AVX-512, bitsandbytes 0.50 only reads
rows of whole blocks.
"""
IDS = torch.arange(64).view(2, 32) * 3 % 251


class Drawn:
    """A matrix of that layer, and what of it was read at once."""

    def __init__(self, layer: LinearLayer = LAYER) -> None:
        generator = torch.Generator().manual_seed(5)
        self.weight = torch.randn(layer.outputs, layer.inputs, generator=generator)
        self.most = 0

    def read(self, name: str, shape: torch.Size, start: int, end: int) -> torch.Tensor:
        self.most = max(self.most, end - start)
        return self.weight.view(-1)[start:end]

    def buffer(self, name: str) -> torch.Tensor | None:
        return None


@pytest.mark.parametrize("kind", KINDS)
def test_any_range_has_the_bytes_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, kind: BaseWeights
) -> None:
    codec, drawn = codec_of(kind, LAYER), Drawn()
    codecs, cpu = {"layer.weight": codec}, torch.device("cpu")
    size = packed_size(kind, LAYER.outputs, LAYER.inputs)
    packed = torch.Size((size.total,))
    whole = QuantizedWeights(drawn, codecs, cpu).read("layer.weight", packed, 0, size.total)
    assert whole.dtype is torch.uint8 and whole.numel() == size.total
    monkeypatch.setattr(quantized, "CHUNK", 20 * BLOCK)
    drawn.most = 0
    source = QuantizedWeights(drawn, codecs, cpu)
    for start, end in ((0, 7), (3, size.header + 1), (size.header - 2, 9_001), (9_000, size.total)):
        part = source.read("layer.weight", packed, start, end)
        assert torch.equal(part, whole[start:end]), (start, end)
    assert drawn.most <= 20 * BLOCK
    matrix = codec.matrix(whole, torch.float32)
    assert 0 < (matrix - drawn.weight).abs().max() < {BaseWeights.int8: 0.02}.get(kind, 0.6)
    plain, shape = DequantizedWeights(drawn, codecs, cpu), drawn.weight.shape
    for start, end in ((0, 5), (63, 65), (170, 30_000), (0, shape.numel())):
        part = plain.read("layer.weight", shape, start, end)
        torch.testing.assert_close(part, matrix.view(-1)[start:end], rtol=0, atol=0)


@pytest.mark.parametrize("double", [False, True])
def test_layers_of_four_bits_are_bitsandbytes_own(double: bool) -> None:
    layer = LinearLayer(name="layer", inputs=WIDTH, outputs=176)
    drawn = Drawn(layer)
    theirs = Linear4bit(
        layer.inputs, layer.outputs, bias=False, quant_type="nf4", compress_statistics=double
    )
    theirs.load_state_dict({"weight": drawn.weight})
    theirs = theirs.to("cpu")
    codec = codec_of(BaseWeights.nf4_double if double else BaseWeights.nf4, layer)
    source = QuantizedWeights(drawn, {"layer.weight": codec}, torch.device("cpu"))
    packed = source.read("layer.weight", torch.Size((codec.total,)), 0, codec.total)
    assert torch.equal(packed[codec.header :], theirs.weight.data.view(-1))
    inputs = torch.randn(3, layer.inputs, requires_grad=True)
    own = inputs.detach().clone().requires_grad_()
    result = quantized._Product.apply(own, packed, codec)
    torch.testing.assert_close(result, theirs(inputs), rtol=0, atol=1e-6)
    theirs(inputs).square().sum().backward()
    result.square().sum().backward()
    torch.testing.assert_close(own.grad, inputs.grad, rtol=1e-5, atol=1e-5)


def test_without_the_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    with pytest.raises(TrainctlError, match=r"missing \(bitsandbytes\)") as caught:
        codec_of(BaseWeights.nf4, LAYER)
    assert caught.value.exit_code == ExitCode.environment and "[finetune]" in caught.value.hint


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_directory(tmp_path_factory.mktemp("base") / "base", intermediate_size=WIDTH)


def plan_on(base: Path, trained: str, processes: int = 1, **changes: object) -> RunPlan:
    config = config_of(Adapting(trained), STEPS)
    config.model.initial_weights = str(base)
    config.model.intermediate_size = WIDTH
    config.checkpoint.at_end = True
    config.schedule = new_section("schedule", "constant", warmup_steps=0)
    for key, value in changes.items():
        section, _, name = key.partition("__")
        setattr(getattr(config, section), name, value)
    return tiny_plan(config, processes)


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory):
    """Run and plan for each quantization of the base, trained on one process."""
    runs = {
        name: (RunPaths(tmp_path_factory.mktemp(name)), plan_on(base, name))
        for name in ("nf4-double", "int8")
    }
    train_cases(1, [Case(plan, run) for run, plan in runs.values()], together=True)
    return runs


def newest(run: RunPaths) -> Path:
    return checkpoints.list_checkpoints(run)[-1].path


def base_of_peft(base: Path, name: str) -> torch.nn.Module:
    """Load the base by transformers with quantized linear layers."""
    settings = {"load_in_8bit": True} if name == "int8" else {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.float32,
    }  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(
        base,
        dtype=torch.float32,
        device_map="cpu",
        quantization_config=BitsAndBytesConfig(**settings),
    )


def curve_of_peft(base: Path, name: str, run: RunPaths, plan: RunPlan) -> list[float]:
    """Return PEFT's losses on the run's batches, starting from the run's initial adapter."""
    config, section = plan.config, plan.config.adapter
    settings = peft.LoraConfig(
        r=section.rank, lora_alpha=section.alpha, target_modules=section.targets
    )
    model = peft.prepare_model_for_kbit_training(
        base_of_peft(base, name), use_gradient_checkpointing=False
    )
    model = peft.get_peft_model(model, settings).train()  # else products are of int8, both sides
    drawn = initial_adapter(config.training.seed, config, Drawn(), {})
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for their_name, parameter in model.named_parameters():
            if "lora_A" in their_name:
                layer = their_name.removeprefix("base_model.model.").partition(".lora_A")[0]
                shape = parameter.shape
                values = drawn.read(f"{layer}.{LORA_A}", shape, 0, shape.numel())
                parameter.copy_(values.view(shape))
    optimizer = torch.optim.AdamW(
        learnt,
        lr=config.optimizer.lr,
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        eps=config.optimizer.epsilon,
        weight_decay=config.optimizer.weight_decay,
    )
    data = TrainingData.of(plan, load_corpora(run.corpus, config.data), data_rank=0, data_size=1)
    losses = []
    for step in range(STEPS):
        batches = data.step(step * plan.batch.global_batch_size, plan.batch)
        count, total = sum(batch.num_labels for batch in batches), 0.0
        for batch in batches:
            logits = model(**batch.model_inputs(torch.device("cpu"))).logits
            loss = summed_cross_entropy(logits, batch.labels) / count
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(learnt, config.optimizer.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize("name", ["nf4-double", "int8"])
def test_the_curve_matches_peft_on_bitsandbytes(trained, base: Path, name: str) -> None:
    run, plan = trained[name]
    ours = [loss for loss, _ in curve(run).values()]
    theirs = curve_of_peft(base, name, run, plan)
    assert ours[-1] < ours[0] - 0.02
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4, (ours, theirs)


def test_a_checkpoint_holds_the_adapter_and_says_how_its_base_was_held(trained, base: Path) -> None:
    run, _ = trained["nf4-double"]
    manifest = read_manifest(newest(run))
    assert all("lora_" in name for name in manifest["shapes"])
    assert manifest["base"]["path"] == str(base)
    assert manifest["adapter"]["base_weights"] == "nf4_double"


@pytest.mark.parametrize("name", ["nf4-double", "int8"])
def test_exports_are_what_was_trained(tmp_path: Path, trained, base: Path, name: str) -> None:
    """PEFT's layers on transformers' quantized base, the merged model, and what is evaluated."""
    run, plan = trained[name]
    export_adapter(plan.config, newest(run), tmp_path / "adapter", dtype=torch.float32)
    written = export(plan.config, newest(run), tmp_path / "merged", dtype=torch.float32)
    assert any("nf4_double" in note or "int8" in note for note in written.notes)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    theirs = peft.PeftModel.from_pretrained(base_of_peft(base, name), tmp_path / "adapter").train()
    ours = load(plan, newest(run), "cpu", lambda *_: None).model
    plain = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        expected, first, second, unlearnt = (
            model(IDS, use_cache=False).logits for model in (theirs, merged, ours, plain)
        )
    assert (expected - unlearnt).abs().max() > 1e-2
    assert (expected - first).abs().max() < 1e-5
    assert (expected - second).abs().max() < 1e-5


@pytest.mark.slow
def test_a_resumed_run_is_bit_for_bit_the_same_and_other_layouts_can_resume_it(
    tmp_path: Path, trained, base: Path
) -> None:
    whole, plan = trained["nf4-double"]
    half = RunPaths(tmp_path / "half")
    other = RunPaths(tmp_path / "other")
    train_cases(1, [Case(with_stop(plan, 3), run) for run in (half, other)], together=True)
    train_cases(1, [Case(plan, half, 2)])
    assert curve(half) == curve(whole)
    ours, theirs = (load_file(newest(run) / "rank-00000.safetensors") for run in (half, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(values, theirs[name]) for name, values in ours.items())
    train_cases(2, [Case(plan_on(base, "nf4-double", 2, zero_stage__stage=3), other, 2)])
    difference = Difference.between(curve(whole), curve(other))
    assert difference.loss < 1e-5 and difference.norm < 1e-5
    plan.config.adapter.base_weights = BaseWeights.nf4
    with pytest.raises(RanksFailed, match=r"base_weights was \"nf4_double\", and is \"nf4\""):
        train_cases(1, [Case(plan, half, 3)])


LAYOUTS = (
    Adapting("nf4-double", "DP2", "3", "full"),
    Adapting("dora-nf4", "DP2", "3"),
    Adapting("nf4", "PP2", "1"),
)
"""The whole product is `scripts/parity_adapters.py`."""


@pytest.mark.slow
def test_a_layout_gives_the_curve_of_one_process(tmp_path: Path) -> None:
    curves = train_all({each for case in LAYOUTS for each in (case, case.reference)}, tmp_path)
    for case in LAYOUTS:
        reference = curves[case.reference]
        assert reference[STEPS][0] < reference[1][0] - 0.04, case
        difference = Difference.between(reference, curves[case])
        assert difference.loss < 1e-5 and difference.norm < 1e-5, case


@pytest.mark.slow
def test_in_sixteen_bits_stages_agree(tmp_path: Path) -> None:
    plain, shared = (
        train(Adapting("nf4", layout, stage, precision="bf16"), tmp_path, steps=2)
        for layout, stage in (("1", "0"), ("DP2", "3"))
    )
    assert Difference.between(plain, shared).loss < 2e-3
