"""Encoders: what is known of them, documents that are kept apart, and one curve on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from encoders import SETTINGS, SHAPE, encoder, encoder_keys
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, trained, with_stop
from transformers import AutoConfig, AutoModelForMaskedLM
from transformers.initialization import TORCH_INIT_FUNCTIONS

from trainctl.config.schema import AttentionKind, ModelConfig, RunConfig
from trainctl.data.corpora import load_corpora
from trainctl.data.prepare import prepare
from trainctl.engines.micro_batch import IGNORED_LABEL
from trainctl.errors import TrainctlError
from trainctl.hardware import resolve_hardware
from trainctl.options.tokenizer.byte import END_OF_DOCUMENT
from trainctl.plans import shapes
from trainctl.plans.mixture import SINGLE_SOURCE
from trainctl.rules.resolve import resolve
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.data import TrainingData, held_out_data
from trainctl.train.export.check import check_directory
from trainctl.train.export.directory import export
from trainctl.train.export.output import load_export
from trainctl.train.models.model import materialise, skeleton
from trainctl.train.models.weights import SeedWeights, parameter_initializers
from trainctl.train.objectives.loss import chunked_cross_entropy, own_head, summed_cross_entropy

CPU = torch.device("cpu")
LENGTH = 64
PUBLISHED = {
    "bert": {"vocab_size": 30522},
    "modernbert": {"vocab_size": 50368},
}
"""Settings of bert-base-uncased and ModernBERT-base, beside the defaults of transformers."""
ADAPTER = {"adapter__kind": "lora", "adapter__rank": 4}
RECOMPUTED = {"activation_checkpointing__mode": "full"}


@pytest.fixture(scope="module", params=["bert", "modernbert"])
def model(request, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return encoder(tmp_path_factory.mktemp(request.param), request.param)


def masking(model: ModelConfig, **changes: Any) -> RunConfig:
    """Build a tiny configuration that trains an encoder on hidden tokens."""
    return tiny_config(
        **{
            **encoder_keys(model),
            "steps": 6,
            "sequence_length": LENGTH,
            "evaluate_every_steps": 3,
            "objective__kind": "masked",
            "data__mask_documents": True,
            "optimizer__lr": 3e-3,
            "schedule__warmup_fraction": 0.0,
            **changes,
        }
    )


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_published_encoder_is_counted_as_it_is(kind: str, tmp_path: Path) -> None:
    model = encoder(tmp_path, kind, **PUBLISHED[kind])
    assert shapes.is_encoder(model)
    with torch.device("meta"):
        built = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(tmp_path))
    count = sum(parameter.numel() for parameter in built.parameters())
    read = shapes.anatomy(model)
    assert read is not None and read.total == count
    # published: 110 M with the pooler (0.59 M), which predicts no token; 149 M
    assert count == {"bert": 109_514_298, "modernbert": 149_655_232}[kind]
    windows = [block.attention[0].window for block in read.blocks]
    alternating = [129 if number % 3 else None for number in range(22)]
    assert windows == ([None] * 12 if kind == "bert" else alternating)
    keys = sum(min(1024, window or 1024) for window in windows)
    assert read.attention_products(1024) == 2 * 768 * keys
    assert read.multiplied == sum(
        parameter.numel()
        for name, parameter in built.named_parameters()
        if parameter.dim() > 1
        and ("embeddings" not in name or built.get_input_embeddings().weight is parameter)
    )


def test_weights_start_as_transformers_starts_them(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tied head is initialised before it is tied; a truncated normal has no values outside."""
    torch.manual_seed(0)
    with monkeypatch.context() as own:
        own.setitem(TORCH_INIT_FUNCTIONS, "trunc_normal_", torch.nn.init.trunc_normal_)
        theirs = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(model.path))
    ours = skeleton(model, torch.float32)
    assert set(parameter_initializers(ours)) == {name for name, _ in ours.named_parameters()}
    materialise(ours, SeedWeights.of(model, ours, 0), CPU)
    for (name, one), (_, other) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        if one.dim() == 1:
            assert torch.equal(one, other), name
            continue
        assert one.std().item() == pytest.approx(other.std().item(), rel=0.1), name
        if model.model_type == "modernbert":
            assert one.abs().max() <= 1.05 * other.abs().max(), name


@pytest.mark.parametrize("attention", [AttentionKind.sdpa, AttentionKind.eager])
def test_documents_do_not_attend_to_each_other(
    model: ModelConfig, attention: AttentionKind
) -> None:
    model.attention = attention
    built = skeleton(model, torch.float32)
    materialise(built, SeedWeights.of(model, built, 0), CPU)
    built.eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.mul_(3)
        documents = [torch.randint(0, 256, (2, length)) for length in (20, 25, 1)]
        packed = {
            "input_ids": torch.cat(documents, dim=1),
            "position_ids": torch.cat([torch.arange(each.shape[1]) for each in documents])[
                None
            ].repeat(2, 1),
        }
        apart = torch.cat([built(input_ids=each).logits for each in documents], dim=1)
        assert (built(**packed).logits - apart).abs().max() < 1e-5
        assert (built(input_ids=packed["input_ids"]).logits - apart).abs().max() > 1e-3
        labels = packed["input_ids"].masked_fill(torch.rand(2, 46) > 0.2, IGNORED_LABEL)
        chunked = chunked_cross_entropy(
            own_head(built),
            built.base_model(**packed).last_hidden_state,
            labels,
            chunk_tokens=7,
            loss=summed_cross_entropy,
        )
        assert float(chunked) == pytest.approx(float(summed_cross_entropy(apart, labels)), rel=1e-5)


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_a_sample_has_its_hidden_tokens_as_labels(tmp_path: Path, packing: str) -> None:
    model = encoder(tmp_path / "bert", "bert")
    how = {"data__packing": packing, "data__max_bytes": 100_000}
    plain = {"steps": 1, "sequence_length": LENGTH, "data__mask_documents": True}
    plans = {
        "masked": tiny_plan(masking(model, **how), 1),
        "next_token": tiny_plan(tiny_config(**plain, **how), 1),
    }
    run = RunPaths(tmp_path / "run")
    run.root.mkdir()
    prepare(plans["masked"], run)
    corpora = load_corpora(run.corpus, plans["masked"].config.data)
    for of in (
        lambda plan: held_out_data(plan, corpora)[SINGLE_SOURCE],
        lambda plan: next(
            iter(TrainingData.of(plan, corpora, data_rank=0, data_size=1).datasets.values())
        ),
    ):
        masked, text = (
            of(plans[kind]).micro_batch(np.array([0, 3, 5, -1]))
            for kind in ("masked", "next_token")
        )
        is_hidden = masked.labels != IGNORED_LABEL
        assert (masked.labels[is_hidden] == text.input_ids[is_hidden]).all()
        assert (masked.input_ids[~is_hidden] == text.input_ids[~is_hidden])[:3].all()
        assert 15 < masked.num_labels < 45 and not is_hidden[3].any()
        assert not (masked.labels == END_OF_DOCUMENT).any()
        assert torch.equal(masked.position_ids, text.position_ids)


def test_what_an_encoder_cannot_do_is_refused_with_why(tmp_path: Path) -> None:
    model = encoder(tmp_path, "bert")

    def problems(config: RunConfig) -> str:
        found = resolve(config, resolve_hardware(config.hardware)).findings
        return " ".join(f"{each.rule} {each.message}. {each.hint};" for each in found)

    assert "TC480" not in problems(masking(model))
    found = problems(masking(model, objective__kind="next_token", sample_tokens=5))
    assert (
        "with bert, an encoder: a token sees the next one" in found and "objective=masked" in found
    )
    assert "training.sample_tokens=5 with bert: an encoder continues no text" in found
    found = problems(tiny_config(objective__kind="masked"))
    assert "objective.kind=masked with llama: its tokens attend to earlier ones alone" in found
    for axis in ("tensor", "pipeline", "sequence"):
        found = problems(masking(model, **{f"parallelism__{axis}": 2}))
        assert (
            f"TC014 parallelism.{axis}=2 with the bert architecture: an encoder's tokens" in found
        )
    small = encoder(tmp_path / "small", "bert", **(SHAPE | SETTINGS["bert"] | {"vocab_size": 257}))
    assert "model.vocab_size=257 has no row for 257, the byte tok" in problems(masking(small))
    with pytest.raises(TrainctlError, match="roberta attends to later tokens too"):
        encoder(tmp_path / "roberta", "roberta", num_hidden_layers=1)


@pytest.mark.slow
def test_every_layout_has_one_curve_and_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """The checkpoint's export loads in transformers, with the logits that the run evaluates."""
    model = encoder(tmp_path / "model", "modernbert")
    layouts = {
        "alone": (1, {"zero_stage__stage": 0, "gradient_accumulation_steps": 1}),
        "zero 1": (2, {"zero_stage__stage": 1}),
        "zero 2": (2, {"zero_stage__stage": 2, **RECOMPUTED}),
        "zero 3": (2, {"zero_stage__stage": 3}),
        "adapter alone": (1, {"zero_stage__stage": 0, **ADAPTER}),
        "adapter, zero 3": (2, {"zero_stage__stage": 3, **ADAPTER}),
    }
    plans = {
        name: tiny_plan(masking(model, **changes), processes)
        for name, (processes, changes) in layouts.items()
    }
    runs = {name: RunPaths(tmp_path / name) for name in layouts}
    resumed = RunPaths(tmp_path / "resumed")
    for size in (1, 2):
        cases = [
            Case(plans[n], runs[n]) for n, (processes, _) in layouts.items() if processes == size
        ]
        cases += [Case(with_stop(plans["zero 3"], 3), resumed)] if size == 2 else []
        train_cases(size, cases, together=True)
    for name in layouts:
        alone = runs["adapter alone" if name.startswith("adapter") else "alone"]
        for kind in ("step", "evaluation"):
            for one, other in zip(records(runs[name], kind), records(alone, kind), strict=True):
                assert one["loss"] == pytest.approx(other["loss"], abs=1e-5), (name, kind)
        for step, (_, norm) in curve(alone).items():
            assert curve(runs[name])[step][1] == pytest.approx(norm, rel=1e-4), (name, step)
    train_cases(2, [Case(plans["zero 3"], resumed, 2)])
    assert curve(resumed) == curve(runs["zero 3"])
    checkpoint = resumed.checkpoints / "step-00000006"
    asked = plans["zero 3"].config, checkpoint, tmp_path / "export"
    export(*asked, dtype=torch.float32)
    checked = check_directory(*asked, dtype=torch.float32)
    assert not checked.differences and checked.difference < 1e-6
    assert type(load_export(tmp_path / "export", None)[0]).__name__ == "ModernBertForMaskedLM"


def records(run: RunPaths, kind: str) -> list[dict[str, Any]]:
    return [each for each in read_events(run.events) if each["event"] == kind]


@pytest.mark.slow
def test_the_curve_is_that_of_a_plain_loop(model: ModelConfig, tmp_path: Path) -> None:
    """The plain loop has transformers' model, torch's AdamW, and masks made by hand."""
    steps, rate = 20, 1e-3
    torch.manual_seed(1)
    plain = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(model.path))
    plain.save_pretrained(tmp_path / "model")
    config = masking(
        model,
        steps=steps,
        evaluation_samples=0,
        evaluate_every_steps=None,
        optimizer__lr=rate,
        optimizer__weight_decay=0.0,
        schedule__kind="constant",
        model__initial_weights=str(tmp_path / "model"),
        zero_stage__stage=0,
    )
    run = trained(tmp_path / "run", config)
    plan = tiny_plan(config, 1)
    data = TrainingData.of(plan, load_corpora(run.corpus, config.data), data_rank=0, data_size=1)
    update = torch.optim.AdamW(
        plain.parameters(),
        lr=rate,
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        eps=config.optimizer.epsilon,
        weight_decay=0.0,
    )
    place = torch.arange(LENGTH)
    is_near = (place[:, None] - place).abs() <= 8
    size = plan.batch.global_batch_size
    for step, (loss, norm) in curve(run).items():
        batches = data.step((step - 1) * size, plan.batch)
        ids, labels, positions, documents = (
            torch.cat([getattr(each, name) for each in batches])
            for name in ("input_ids", "labels", "position_ids", "document_ids")
        )
        mask = documents[:, None, :, None] == documents[:, None, None, :]
        if model.model_type == "modernbert":
            mask = {"full_attention": mask, "sliding_attention": mask & is_near}
        logits = plain(input_ids=ids, position_ids=positions, attention_mask=mask).logits
        theirs = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL)
        theirs.backward()
        assert loss == pytest.approx(theirs.item(), abs=1e-5 if step == 1 else 1e-4), step
        clipped = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert norm == pytest.approx(clipped.item(), rel=1e-3), step
        update.step()
        update.zero_grad()
