"""Multi-token prediction: blocks behind the last one, and one curve on every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, with_stop
from transformers import AutoModelForCausalLM

from trainctl.config.compose import compose
from trainctl.engines.micro_batch import IGNORED_LABEL
from trainctl.hardware import resolve_hardware
from trainctl.memory.budget import budget
from trainctl.plans.flops import flops_of_run
from trainctl.plans.shapes import all_tensors, count_parameters
from trainctl.rules.resolve import resolve
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.export.directory import export
from trainctl.train.models.model import materialise, skeleton
from trainctl.train.models.weights import SeedWeights
from trainctl.train.objectives.loss import losses_with_future
from trainctl.tuning.speed import step_time


def predicting(**changes):
    """Build a tiny configuration that predicts two further tokens of packed texts."""
    return tiny_config(
        **{
            "steps": 4,
            "sequence_length": 64,
            "evaluate_every_steps": 2,
            "sample_tokens": 0,
            "checkpoint__every_steps": 2,
            "objective__kind": "multi_token",
            "objective__future_tokens": 2,
            "model__future_blocks": 2,
            "data__max_bytes": 60_000,
            "data__packing": "best_fit",
            "data__mask_documents": True,
            "zero_stage__stage": 0,
            **changes,
        }
    )


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_blocks_and_losses_match_their_definition(family):
    """Each block sees the shifted sequence, cut rather than padded."""
    shape = predicting(model__family=family).model
    model = skeleton(shape, torch.float32)
    materialise(model, SeedWeights.of(shape, model, 1), torch.device("cpu"))
    found = {name: tuple(each.shape) for name, each in model.named_parameters()}
    assert found == {tensor.name: tensor.shape for tensor in all_tensors(shape)}
    assert sum(p.numel() for p in model.parameters()) == count_parameters(shape).total
    torch.manual_seed(0)
    ids = torch.randint(shape.vocab_size, (2, 13))
    inputs, labels = ids[:, :-1], ids[:, 1:].clone()
    labels[1, 3:5] = IGNORED_LABEL
    loss, future = losses_with_future(model, {"input_ids": inputs, "use_cache": False}, labels)
    plain = model(input_ids=inputs).logits
    assert float(loss.detach()) == pytest.approx(cross_entropy(plain, labels), rel=1e-6)
    hidden, expected, has_label = model.model(input_ids=inputs).last_hidden_state, 0.0, labels
    for number, block in enumerate(model.mtp, start=1):
        hidden, has_label = hidden[:, :-1], has_label[:, :-1]
        joined = torch.cat(
            [block.enorm(model.model.embed_tokens(inputs[:, number:])), block.hnorm(hidden)], -1
        )
        positions = torch.arange(joined.shape[1])[None]
        rotary = model.model.rotary_emb(joined, positions)
        projected = block.eh_proj(joined)
        hidden = block.post_norm(
            block.mtp_block(projected, attention_mask=None, position_embeddings=rotary)
        )
        targets = labels[:, number:].masked_fill(has_label == IGNORED_LABEL, IGNORED_LABEL)
        has_label = targets
        expected += cross_entropy(model.lm_head(hidden), targets) / 2
    assert float(future.detach()) == pytest.approx(expected, rel=1e-6)
    future.backward()
    assert all(p.grad is not None for p in model.mtp.parameters())


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    flat = logits.detach().flatten(0, 1), labels.flatten()
    return float(F.cross_entropy(*flat, ignore_index=IGNORED_LABEL, reduction="sum"))


def planned(*overrides):
    config = compose(["recipe=7b-zero3", *overrides]).config
    return resolve(config, resolve_hardware(config.hardware))


def test_blocks_are_in_plan_and_budget():
    one = planned("kernels=plain").plan
    more = planned("kernels=plain", "objective=multi_token").plan
    assert more.config.model.future_blocks == 1
    model = more.config.model
    block = count_parameters(model).block
    added = block + 2 * model.hidden_size**2 + 3 * model.hidden_size
    before = count_parameters(one.config.model).total
    assert count_parameters(model).total == before + added
    head = model.vocab_size * model.hidden_size
    flops = [flops_of_run(each.config, 4096) for each in (one, more)]
    keys = 12 * model.num_attention_heads * (model.hidden_size // model.num_attention_heads) * 4096
    matrices = block - 2 * model.hidden_size + 2 * model.hidden_size**2 + head
    assert flops[1] - flops[0] == 6 * matrices + keys
    assert budget(more).checkpoint_bytes - budget(one).checkpoint_bytes == pytest.approx(
        12 * added, rel=0.01
    )
    assert budget(more).components.logits == 2 * budget(one).components.logits
    # So predicted MFU stays about the same.
    seconds = [step_time(each).compute for each in (one, more)]
    assert seconds[1] / seconds[0] == pytest.approx(flops[1] / flops[0], rel=0.01)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("parallelism.tensor=2", "parallelism.tensor"),
        ("adapter=lora", "adapter.kind"),
        ("model=gpt2-124m", "model.family"),
    ],
)
def test_what_has_not_been_compared_is_refused(override, key):
    found = planned("objective=multi_token", override).findings
    assert key in {each.key for each in found if each.rule == "TC472"}


@pytest.mark.slow
def test_every_layout_has_one_curve_and_exports_load(tmp_path: Path):
    layouts = {
        "alone": (1, {}),
        "zero 1": (2, {"zero_stage__stage": 1}),
        "zero 3": (
            2,
            {"zero_stage__stage": 3, "activation_checkpointing__mode": "full"},
        ),
    }
    runs = {name: RunPaths(tmp_path / name) for name in [*layouts, "resumed", "started"]}
    plans = {
        name: tiny_plan(predicting(**changes), processes)
        for name, (processes, changes) in layouts.items()
    }
    train_cases(
        1,
        [
            Case(plans["alone"], runs["alone"]),
            Case(with_stop(plans["alone"], 2), runs["resumed"]),
        ],
        together=True,
    )
    train_cases(
        2,
        [Case(plans[name], runs[name]) for name in layouts if name != "alone"],
        together=True,
    )
    for name in layouts:
        for step, (loss, norm) in curve(runs["alone"]).items():
            found = curve(runs[name])[step]
            assert found == pytest.approx((loss, norm), abs=1e-5), (name, step)
    train_cases(1, [Case(plans["alone"], runs["resumed"], 2)])
    assert curve(runs["resumed"]) == curve(runs["alone"])
    steps = [each for each in read_events(runs["alone"].events) if each["event"] == "step"]
    assert steps[-1]["objective"]["future_cross_entropy"] > steps[-1]["loss"] > 0
    checkpoint = runs["zero 3"].checkpoints / "step-00000004"
    exported = export(plans["zero 3"].config, checkpoint, tmp_path / "out", dtype=torch.float32)
    assert any("further tokens" in note for note in exported.notes)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys"))
    # A run from the export draws the blocks anew.
    config = predicting(model__initial_weights=str(tmp_path / "out"), steps=1)
    train_cases(1, [Case(tiny_plan(config, 1), runs["started"])])
    started = curve(runs["started"])[1][0]
    assert started < steps[0]["loss"] - 0.01
