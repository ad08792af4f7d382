"""Adapters and frozen weights: against PEFT, over layouts, in checkpoints and exports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from adapter_cases import Adapting, base_directory, config_of, train_all
from fabricated import fabricate
from fork_server import RanksFailed
from parity_cases import Difference
from rank_processes import Case, curve, tiny_plan, train_cases, with_stop
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainctl.config.schema import DataType, TokenizerFromPath
from trainctl.data.corpus import Corpus
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.adapter import Adapter
from trainctl.plans.mixture import SINGLE_SOURCE
from trainctl.plans.settings import number_formats
from trainctl.plans.trainable import adapted_layers
from trainctl.runs import checkpoints
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import read_manifest
from trainctl.runs.records import read_events
from trainctl.train.adapters.layers import LoraLayer, apply_adapter, attach, initial_adapter
from trainctl.train.data import held_out_data
from trainctl.train.evaluation import evaluate_sources
from trainctl.train.export.adapter import export_adapter, peft_config
from trainctl.train.export.check import check_adapter
from trainctl.train.export.directory import export
from trainctl.train.models.frozen_base import FullModel, OverlayWeights, recorded_base
from trainctl.train.models.loaded import load
from trainctl.train.models.model import TORCH_TYPES, materialise, skeleton, transformers_config
from trainctl.train.models.weights import SeedWeights

STEPS = 6
IDS = torch.arange(64).view(2, 32) * 3 % 251


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def newest(run: RunPaths) -> Path:
    return checkpoints.list_checkpoints(run)[-1].path


def started(folder: Path, trained: str, base: Path, processes: int = 1, **layout: object):
    """Return the paths and plan of an untrained adapter run on the base directory."""
    config = config_of(Adapting(trained=trained), STEPS)
    config.model.initial_weights = str(base)
    config.checkpoint.at_end = True
    for key, value in layout.items():
        section, _, name = key.partition("__")
        setattr(getattr(config, section), name, value)
    folder.mkdir(parents=True, exist_ok=True)
    return RunPaths(folder), tiny_plan(config, processes)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_directory(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory):
    """LoRA and DoRA, trained on one process."""
    runs = {kind: started(tmp_path_factory.mktemp(kind), kind, base) for kind in ("lora", "dora")}
    train_cases(1, [Case(plan, run) for run, plan in runs.values()], together=True)
    return runs


def test_an_adapter_carries_the_tokenizer(tmp_path: Path, trained) -> None:
    run, plan = trained["lora"]
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    section = TokenizerFromPath(kind="hf", path=str(tmp_path))
    config = replace(plan.config, tokenizer=section)
    written = export_adapter(config, newest(run), tmp_path / "out", dtype=torch.float32)
    assert {"tokenizer.json", "tokenizer_config.json"} <= {*written.files}
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("b")["input_ids"] == [1]


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_peft_loads_the_adapter_and_the_merged_model_equals_it(
    tmp_path: Path, trained, base: Path, kind: str
) -> None:
    run, plan = trained[kind]
    out, merged = tmp_path / "adapter", tmp_path / "merged"
    written = export_adapter(plan.config, newest(run), out, dtype=torch.float32)
    assert written.files == ["adapter_config.json", "adapter_model.safetensors"]
    assert any(note.startswith("no tokenizer files") for note in written.notes)
    checked = check_adapter(plan.config, newest(run), out, dtype=torch.float32)
    assert checked.differences == [] and checked.difference <= checked.bound < 1e-4
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
    theirs = logits_of(loaded)
    assert (theirs - logits_of(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 1e-2
    made = export(plan.config, newest(run), merged, dtype=torch.float32, shard_bytes=200_000)
    assert len([name for name in made.files if name.startswith("model-")]) > 1
    ours = AutoModelForCausalLM.from_pretrained(merged)
    assert (logits_of(ours) - theirs).abs().max() < 5e-6
    for name, values in loaded.merge_and_unload().state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], values, rtol=0, atol=1e-6)


def test_a_scale_that_peft_does_not_know_is_in_its_alpha(monkeypatch) -> None:
    config = config_of(Adapting(), STEPS)
    section = config.adapter
    section.rank, section.alpha = 4, 10.0
    for power, is_rooted, alpha in ((1.0, False, 10.0), (0.5, True, 10.0), (0.0, False, 40.0)):
        spec = Adapter(name="lora", keys=type(section), rank_power=power)
        monkeypatch.setattr("trainctl.train.export.adapter.spec_of", lambda _, spec=spec: spec)
        written = peft_config(section, (), config.model, {"kind": "seed"})
        assert (written["use_rslora"], written["lora_alpha"]) == (is_rooted, alpha)
        assert alpha / 4 ** (0.5 if is_rooted else 1) == spec.scale(section)


def test_a_narrow_model_is_evaluated_as_it_was_trained(tmp_path: Path, base: Path) -> None:
    """Merged, the sum of weight and adapter would be rounded to bf16."""
    changes = {
        "precision__compute": DataType.bf16,
        "training__steps": 4,
        "training__sequence_length": 64,
        "training__global_batch_size": 4,
        "training__evaluation_samples": 8,
    }
    run, plan = started(tmp_path, "lora", base, **changes)
    train_cases(1, [Case(plan, run)])
    recorded = read_events(run.events, "evaluation")[-1]["loss"]
    model = load(plan, newest(run), "cpu", lambda *_: None)
    held_out = held_out_data(plan, {SINGLE_SOURCE: Corpus.load(run.corpus)})
    with model.inference():
        found = evaluate_sources(
            model.score,
            held_out,
            num_samples=plan.config.training.evaluation_samples,
            micro_batch_size=plan.batch.micro_batch_size,
        )
    assert found.loss == pytest.approx(recorded, abs=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_dora_starts_as_its_base_in_the_format_that_it_computes_in(precision: str) -> None:
    config = config_of(Adapting("dora", precision=precision), STEPS)
    dtype = TORCH_TYPES[number_formats(config.precision).weights]
    plain, model = (skeleton(config.model, dtype) for _ in range(2))
    shapes = FullModel.of(config.model, plain).shapes
    drawn = SeedWeights.of(config.model, plain, 7)
    apply_adapter(model, config)
    added = [name for name, each in model.named_parameters() if each.requires_grad]
    source = OverlayWeights(initial_adapter(7, config, drawn, shapes), added, drawn)
    materialise(plain, drawn, torch.device("cpu"))
    materialise(model, source, torch.device("cpu"))
    assert torch.equal(logits_of(model), logits_of(plain))


@pytest.mark.parametrize("kind", ["lora", "dora", "rslora"])
def test_layers_compute_what_peft_s_do(base: Path, kind: str) -> None:
    config = config_of(Adapting(trained=kind), STEPS)
    section = config.adapter
    theirs = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        peft.LoraConfig(
            r=section.rank,
            lora_alpha=section.alpha,
            target_modules=section.targets,
            use_dora=kind == "dora",
            use_rslora=kind == "rslora",
            init_lora_weights=False,
        ),
    )
    ours = AutoModelForCausalLM.from_pretrained(base)
    attach(ours, section, adapted_layers(config.model, section))
    for name, module in ours.named_modules():
        if isinstance(module, LoraLayer):
            their = theirs.get_submodule(f"base_model.model.{name}")
            module.lora_A = torch.nn.Parameter(their.lora_A.default.weight.detach().clone())
            module.lora_B = torch.nn.Parameter(their.lora_B.default.weight.detach().clone())
            if kind == "dora":
                length = their.lora_magnitude_vector.default.weight.detach().clone()
                module.lora_magnitude = torch.nn.Parameter(length)
    for model in (ours, theirs):
        model(IDS, labels=IDS).loss.backward()
    torch.testing.assert_close(logits_of(ours), logits_of(theirs), rtol=0, atol=1e-6)
    for name, module in ours.named_modules():
        if isinstance(module, LoraLayer):
            their = theirs.get_submodule(f"base_model.model.{name}").lora_B.default.weight.grad
            torch.testing.assert_close(module.lora_B.grad, their, rtol=1e-4, atol=1e-6)


def test_a_checkpoint_holds_the_adapter_and_names_its_base(trained, base: Path) -> None:
    run, _ = trained["lora"]
    manifest = read_manifest(newest(run))
    assert manifest["shapes"] and all("lora_" in name for name in manifest["shapes"])
    assert (
        manifest["base"]["path"] == str(base) and "model.safetensors" in manifest["base"]["files"]
    )
    assert manifest["adapter"]["kind"] == "lora"


@pytest.mark.slow
def test_a_resumed_run_is_bit_for_bit_the_same_and_other_layouts_can_resume_it(
    tmp_path: Path, trained, base: Path
) -> None:
    whole, plan = trained["lora"]
    half, plan = started(tmp_path / "half", "lora", base)
    ways = [(3, 1), (1, 2)]
    others = {way: started(tmp_path / f"stage-{way[0]}", "lora", base) for way in ways}
    stopped = [Case(with_stop(first, 3), run) for run, first in ((half, plan), *others.values())]
    train_cases(1, stopped, together=True)
    train_cases(1, [Case(plan, half, 2)])
    assert curve(half) == curve(whole)
    ours, theirs = (load_file(newest(run) / "rank-00000.safetensors") for run in (half, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(values, theirs[name]) for name, values in ours.items())
    resumed = []
    for (stage, tensor), (other, _) in others.items():
        axes = {"zero_stage__stage": stage, "parallelism__tensor": tensor}
        _, second = started(tmp_path, "lora", base, 2, **axes)
        resumed.append(Case(second, other, 2))
    train_cases(2, resumed, together=True)
    for way, (other, _) in others.items():
        difference = Difference.between(curve(whole), curve(other))
        assert difference.loss < 1e-5 and difference.norm < 1e-5, way


@pytest.mark.parametrize("model", ["llama", "llama-untied"])
def test_what_trains_beside_an_adapter_is_exported_with_it(tmp_path: Path, model: str) -> None:
    """Embedding and head, tied and not: PEFT reads them, and a merged model has them."""
    base, run = tmp_path / "base", RunPaths(tmp_path / "run")
    config = config_of(Adapting("lora-also", model=model), STEPS)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(transformers_config(config.model)).save_pretrained(base)
    config.model.initial_weights, config.checkpoint.at_end = str(base), True
    plan = tiny_plan(config, 1)
    train_cases(1, [Case(plan, run)])
    assert "model.embed_tokens.weight" in read_manifest(newest(run))["shapes"]
    export_adapter(plan.config, newest(run), tmp_path / "adapter", dtype=torch.float32)
    export(plan.config, newest(run), tmp_path / "merged", dtype=torch.float32)
    start, merged = (AutoModelForCausalLM.from_pretrained(p) for p in (base, tmp_path / "merged"))
    for part in ("get_input_embeddings", "get_output_embeddings"):
        before, after = (getattr(each, part)().weight for each in (start, merged))
        assert (before - after).abs().max() > 1e-3
    theirs = peft.PeftModel.from_pretrained(start, tmp_path / "adapter")
    assert (logits_of(merged) - logits_of(theirs)).abs().max() < 5e-6


def test_a_bias_that_trained_beside_its_layer_s_adapter_is_in_the_merged_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT's `modules_to_save` would replace the whole layer, together with its adapter."""
    config = config_of(Adapting(model="gpt2"), STEPS)
    config.adapter.also_train = ["c_attn.bias"]
    run = RunPaths(tmp_path / "run")
    run.root.mkdir()
    checkpoint = fabricate(run, config.model)
    monkeypatch.setattr("trainctl.train.export.adapter.adapter_of", lambda _: config.adapter)
    with pytest.raises(TrainctlError, match=r"0\.attn\.c_attn\.bias was trained") as caught:
        export_adapter(config, checkpoint, tmp_path / "adapter", dtype=torch.float32)
    assert "merged" in caught.value.hint and not (tmp_path / "adapter").exists()


LAYOUTS = (
    Adapting("lora-all", "DP2", "3", "full"),
    Adapting("lora-also", "TP2", "2"),
    Adapting("dora", "TP2", "2"),
    Adapting("some", "PP2", "0"),
    Adapting("last-blocks", "DP2", "2"),
    Adapting("lora", "SP2", "1", model="gpt2"),
)
"""The whole product is `scripts/parity_adapters.py`."""


@pytest.mark.slow
def test_a_layout_gives_the_curve_of_one_process(tmp_path: Path) -> None:
    curves = train_all({each for case in LAYOUTS for each in (case, case.reference)}, tmp_path)
    for case in LAYOUTS:
        reference = curves[case.reference]
        assert reference[STEPS][0] < reference[1][0] - 0.05, case
        difference = Difference.between(reference, curves[case])
        assert difference.loss < 1e-5 and difference.norm < 1e-5, case


@pytest.mark.slow
def test_a_tied_weight_that_is_frozen_has_no_gradient_to_share_between_stages(
    tmp_path: Path,
) -> None:
    """DeepSpeed asks for it where bf16 gradients are added up in fp32."""
    config = config_of(Adapting("lora-all", "PP2", "1", precision="bf16", model="llama"), STEPS)
    config.precision.gradient_accumulation = DataType.fp32
    config.training.sequence_length, config.training.global_batch_size = 64, 4
    run = RunPaths(tmp_path)
    train_cases(2, [Case(tiny_plan(config, 2), run)])
    losses = [loss for loss, _ in curve(run).values()]
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.slow
def test_what_is_dropped_is_dropped_again_where_a_block_is_recomputed(tmp_path: Path) -> None:
    cases = []
    for name, tiles, mode in (("plain", 1, "none"), ("again", 1, "full"), ("tiles", 4, "none")):
        config = config_of(Adapting("lora-all", checkpointing=mode), STEPS, dropout=0.2)
        config.kernels.mlp_tiles = tiles
        cases.append(Case(tiny_plan(config, 1), RunPaths(tmp_path / name)))
    train_cases(1, cases, together=True)
    plain, again, tiles = (curve(case.run) for case in cases)
    assert Difference.between(plain, again).loss < 1e-6
    assert plain != tiles and tiles[STEPS][0] < tiles[1][0] - 0.05  # drawn tile by tile


def test_a_base_that_changed_is_refused(tmp_path: Path, base: Path) -> None:
    other = base_directory(tmp_path / "base")
    run, plan = started(tmp_path / "run", "lora", other)
    train_cases(1, [Case(with_stop(plan, 2), run)])
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 1e-3
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    for task in (lambda: export(plan.config, newest(run), tmp_path / "out", dtype=torch.float32),):
        with pytest.raises(TrainctlError, match=r"model\.safetensors has changed") as caught:
            task()
        assert caught.value.exit_code is ExitCode.run_state

    with pytest.raises(RanksFailed, match=r"model\.safetensors has changed"):
        train_cases(1, [Case(plan, run, 2)])


def test_a_seed_by_which_other_weights_are_drawn_is_refused() -> None:
    def whole(**changes: float) -> FullModel:
        shape = replace(config_of(Adapting(), STEPS).model, **changes)
        return FullModel.of(shape, skeleton(shape, torch.float32))

    first = whole()
    drawn = SeedWeights.of(first.config, first.skeleton, 7)
    facts = {"kind": "seed", "seed": 7, "sha256": drawn.initializers_digest}
    assert recorded_base(facts, first).facts == facts
    with pytest.raises(TrainctlError, match="draw other weights") as caught:
        recorded_base(facts, whole(initializer_range=0.5))
    assert caught.value.exit_code is ExitCode.run_state
