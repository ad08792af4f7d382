"""muP: activations do not depend on the width, layouts agree, and an export computes the same."""

import json
import math

import coordinates
import pytest
import torch
from fabricated import fabricate
from fork_server import RanksFailed
from held_out import evaluate
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, trained
from transformers import AutoModelForCausalLM

from trainctl.config.schema import (
    CrossEntropyKind,
    ModelConfig,
)
from trainctl.data.corpus import Corpus
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.model import families
from trainctl.plans.mup import check_multipliers, multipliers
from trainctl.runs.checkpoints import newest_checkpoint
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.data import PackedDataset
from trainctl.train.evaluation import inference
from trainctl.train.export.directory import export
from trainctl.train.models.loaded import load
from trainctl.train.models.model import skeleton
from trainctl.train.models.weights import SeedWeights

FAMILIES = [spec.name for spec in families() if spec.has_mup]
STEPS = 3


def test_activations_depend_on_the_width_without_mup_and_not_with_it(tmp_path):
    few = coordinates.WIDTHS[:3]
    flat = coordinates.check(tmp_path / "with", mup=True, widths=few, seeds=(1,))
    assert all(abs(slope) < coordinates.LIMIT for slope in flat.slopes.values()), flat.slopes
    steep = coordinates.check(tmp_path / "without", mup=False, widths=few, seeds=(1,))
    assert not steep.is_flat
    for measure, place, slope in (
        ("size", "attention", 0.5),
        ("size", "feed-forward", 1.0),
        ("change", "last block", 1.0),
        ("change", "logits", 0.2),
    ):
        assert steep.slopes[measure, place] > slope, coordinates.table(steep)
        assert steep.sizes[64][place][measure] == flat.sizes[64][place][measure]  # m is 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "optimizer"),
    [
        ("llama", "adamw"),
        ("gpt2", "adamw"),
        ("mistral", "adamw"),
        ("qwen3", "adamw"),
        ("llama", "lion"),
        ("llama", "muon"),
        ("llama", "sgd"),
    ],
)
def test_every_family_and_optimizer_that_has_a_table(family, optimizer, tmp_path):
    kinds = family, optimizer
    flat = coordinates.check(
        tmp_path / "with", mup=True, family=kinds[0], optimizer=kinds[1], seeds=(1,)
    )
    assert flat.is_flat, coordinates.table(flat)
    steep = coordinates.check(
        tmp_path / "without",
        mup=False,
        family=kinds[0],
        optimizer=kinds[1],
        widths=coordinates.WIDTHS[:3],
        seeds=(1,),
    )
    assert not steep.is_flat, coordinates.table(steep)


def scaled(family="llama", *, mup=True, **changes):
    """Twice the base's width, in heads that are twice as wide."""
    base = {"model__mup_base_width": 32, "model__mup_base_head_dim": 8} if mup else {}
    return tiny_config(
        steps=STEPS,
        evaluate_every_steps=STEPS,
        sample_tokens=8,
        **{
            "precision__compute": "fp32",
            "optimizer__lr": 1e-2,
            "model__family": family,
            "model__num_attention_heads": 4,
            "model__num_key_value_heads": None if family == "gpt2" else 2,
            "model__mup": mup,
            "model__initializer_range": 0.1,
            **base,
            **changes,
        },
    )


def at_the_end(run):
    """Held-out loss and the sampled text."""
    events = {event["event"]: event for event in read_events(run.events)}
    return events["evaluation"]["loss"], events["sample"]["text"]


LAYOUTS = {
    "llama": [
        {"zero_stage__stage": 3},
        {"zero_stage__stage": 1, "parallelism__sequence": 2},
        {"zero_stage__stage": 0, "parallelism__pipeline": 2},
        {"zero_stage__stage": 2, "kernels__cross_entropy": CrossEntropyKind.chunked},
    ],
    "gpt2": [
        {"zero_stage__stage": 1, "parallelism__tensor": 2},
        {
            "zero_stage__stage": 3,
            "parallelism__tensor": 2,
            "kernels__cross_entropy": CrossEntropyKind.chunked,
        },
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_layout_computes_what_one_process_does(family, tmp_path):
    alone, plain = RunPaths(tmp_path / "alone"), RunPaths(tmp_path / "plain")
    single = [
        Case(tiny_plan(scaled(family, mup=mup, zero_stage__stage=0), 1), run)
        for mup, run in ((True, alone), (False, plain))
    ]
    train_cases(1, single, together=True)
    cases = [
        Case(tiny_plan(scaled(family, **layout), 2), RunPaths(tmp_path / str(number)))
        for number, layout in enumerate(LAYOUTS[family])
    ]
    train_cases(2, cases, together=True)
    expected, without = curve(alone), curve(plain)
    assert all(abs(expected[step][0] - without[step][0]) > 1e-2 for step in expected)
    for run, layout in zip((case.run for case in cases), LAYOUTS[family], strict=True):
        found = curve(run)
        for step, (loss, norm) in expected.items():
            assert found[step][0] == pytest.approx(loss, rel=2e-6), layout
            assert found[step][1] == pytest.approx(norm, rel=1e-5), layout
        (loss, text), (expected_loss, expected_text) = at_the_end(run), at_the_end(alone)
        assert loss == pytest.approx(expected_loss, abs=5e-6), layout
        assert text == expected_text, layout


def test_outside_training_and_in_transformers_the_model_is_the_same(tmp_path):
    """The recorded held-out loss is compared, and the logits of the exported model."""
    configs = {family: scaled(family, zero_stage__stage=2) for family in ("llama", "gpt2")}
    runs = {family: RunPaths(tmp_path / family) for family in configs}
    cases = [Case(tiny_plan(config, 2), runs[family]) for family, config in configs.items()]
    train_cases(2, cases, together=True)
    for family, config in configs.items():
        run = runs[family]
        newest, _ = newest_checkpoint(run)
        ours = load(tiny_plan(config, 2), newest.path, "cpu", lambda *_: None)
        corpus = Corpus.load(run.corpus)
        dataset = PackedDataset(corpus, corpus.held_out, sequence_length=128, mask_documents=False)
        with inference(ours.model):
            loss = evaluate(ours.score, dataset, num_samples=8, micro_batch_size=2)
        assert loss == pytest.approx(at_the_end(run)[0], abs=2e-6)
        assert_exports(config, newest.path, tmp_path / f"{family}-out")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_export_of_any_weights_computes_the_same_without_multipliers(family, tied, tmp_path):
    """Norms and biases too, which training has hardly moved."""
    config = scaled(family, model__tie_word_embeddings=tied)
    checkpoint = fabricate(RunPaths(tmp_path / "run"), config.model, deviation=0.3)
    assert_exports(config, checkpoint, tmp_path / "out")


def assert_exports(config, checkpoint, out):
    export(config, checkpoint, out, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ours = load(tiny_plan(config, 2), checkpoint, "cpu", lambda *_: None).model
    ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = ours(ids).logits
        largest = float(expected.abs().max())
        torch.testing.assert_close(theirs(ids).logits, expected, rtol=0, atol=5e-6 * largest)
        for setting in ("mup_base_width", "mup_base_head_dim"):  # each of the two does something
            plain = scaled(config.model.family).model
            plain.tie_word_embeddings = config.model.tie_word_embeddings
            setattr(plain, setting, 64 if setting == "mup_base_width" else None)
            other = skeleton(plain, torch.float32)
            other.load_state_dict(ours.state_dict(), assign=True)
            assert float((other(ids).logits - expected).abs().max()) > 1e-3 * largest, setting
    settings = json.loads((out / "config.json").read_text())
    assert not any("mup" in key for key in settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_weights_shrink_with_the_width_inside_the_blocks_only(family):
    model = ModelConfig(family=family, num_layers=2, tie_word_embeddings=False)
    model.num_key_value_heads = None if family == "gpt2" else 2
    plain = SeedWeights.of(model, skeleton(model, torch.float32), 3)
    wide = ModelConfig(**{**vars(model), "mup": True, "mup_base_width": 32})
    scaled = SeedWeights.of(wide, skeleton(wide, torch.float32), 3)
    for name, parameter in skeleton(model, torch.float32).named_parameters():
        values, expected = (
            source.read(name, parameter.shape, 0, parameter.numel()) for source in (scaled, plain)
        )
        is_hidden = parameter.dim() > 1 and (".layers." in name or ".h." in name)
        factor = math.sqrt(32 / 128) if is_hidden else 1.0
        torch.testing.assert_close(values, expected * factor, rtol=1e-6, atol=0)


def test_a_checkpoint_is_refused_under_other_multipliers(tmp_path):
    config = scaled(zero_stage__stage=0, training__stop_after_steps=2)
    run = trained(tmp_path / "run", config)
    newest, _ = newest_checkpoint(run)
    manifest = json.loads((newest.path / "manifest.json").read_text())
    assert manifest["multipliers"] == {"output": 0.5, "attention": math.sqrt(0.5)}
    check_multipliers(config.model, "step-2", manifest)
    check_multipliers(ModelConfig(), "old", {})
    plain = scaled(mup=False, zero_stage__stage=0)
    with pytest.raises(
        TrainctlError, match=r"multiplied by 0\.5 and attention by 0\.707"
    ) as caught:
        check_multipliers(plain.model, "step-2", manifest)
    assert caught.value.exit_code == ExitCode.run_state
    # A resume under another base, and a new run from the weights, both say so.
    config.model.mup_base_width, config.training.stop_after_steps = 16, None
    with pytest.raises(RanksFailed, match=r"this configuration has 0\.25"):
        train_cases(1, [Case(tiny_plan(config, 1), run, attempt=2)])
    for use in (
        lambda: load(tiny_plan(config, 1), newest.path, "cpu", lambda *_: None),
        lambda: export(config, newest.path, tmp_path / "out", dtype=torch.float32),
    ):
        with pytest.raises(TrainctlError, match=r"this configuration has 0\.25"):
            use()
    assert not (tmp_path / "out").exists()
    plain.model.initial_weights = str(run.root)
    with pytest.raises(RanksFailed, match="this configuration has 1 and 1"):
        trained(tmp_path / "new", plain)


def test_without_mup_there_are_no_multipliers():
    assert multipliers(ModelConfig()) == {"output": 1.0, "attention": 1.0}
    model = skeleton(ModelConfig(), torch.float32)
    assert not model.lm_head._forward_pre_hooks
