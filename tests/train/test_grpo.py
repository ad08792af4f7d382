"""Reinforcement by rewards: losses and advantages, which are TRL's and the papers'."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fork_server import RanksFailed
from grpo_kills import BATCH, SAMPLES, sampling, trial, whole_run, write_prompts
from rank_processes import Case, curve, tiny_plan, train_cases, trained
from trl_trainers import compare_steps, train_with_trl

from trainctl.config.registry import new_section
from trainctl.engines.micro_batch import IGNORED_LABEL
from trainctl.options.objective.grpo import Advantage, NormalizeBy, Ratio
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.runs.rollouts import read_rollouts, rollout_steps
from trainctl.train.models.model import skeleton
from trainctl.train.objectives.base import ObjectiveLoss
from trainctl.train.objectives.grpo import advantages_of, divisors_of
from trainctl.train.rollouts import AnswerWriter, drop_phases, folder_name, read_answers

ANSWERS, LENGTH, LONGEST = 6, 9, 12
ADAPTER = {"adapter__kind": "lora", "adapter__rank": 4, "objective__kl_weight": 0.1}


def test_advantages_match_their_papers():
    rewards = np.array([[1.0, 0.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0]], np.float32)
    first = rewards[0]
    expected = {
        Advantage.standardized: (first - 1) / (first.std(ddof=1) + 1e-4),
        Advantage.centered: first - 1,
        Advantage.leave_one_out: [1 - 1, 0 - 4 / 3, 0 - 4 / 3, 3 - 1 / 3],
    }
    for kind, values in expected.items():
        section = new_section("objective", "grpo", advantage=kind)
        found = advantages_of(section, rewards)
        assert found[0] == pytest.approx(values, abs=1e-6), kind
        assert found[1].tolist() == [0.0] * 4
        # An answer that no reward judges neither learns nor moves the mean of the others.
        unjudged = np.array([[1.0, np.nan, 0.0, 3.0]], np.float32)
        without = advantages_of(section, np.array([[1.0, 0.0, 3.0]], np.float32))
        assert advantages_of(section, unjudged)[0, [0, 2, 3]] == pytest.approx(without[0])
        assert advantages_of(section, unjudged)[0, 1] == 0


VARIANTS = {
    "grpo": ({}, {"loss_type": "grpo"}),
    "grpo with kl": ({"kl_weight": 0.1}, {"loss_type": "grpo", "beta": 0.1}),
    "gspo": ({"ratio": Ratio.sequence}, {"loss_type": "grpo", "level": "sequence"}),
    "dapo": (
        {"normalize_by": NormalizeBy.tokens, "clip_high": 0.28},
        {"loss_type": "dapo", "high": 0.28},
    ),
    "dr_grpo": (
        {"normalize_by": NormalizeBy.length, "max_answer_tokens": LONGEST},
        {"loss_type": "dr_grpo"},
    ),
    "importance": ({"importance_cap": 1.1}, {"loss_type": "grpo", "vllm": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_losses_and_gradients_match_trl(name: str):
    """TRL's own loss function gets the log-probabilities that ours gets."""
    from trl import GRPOTrainer

    ours, theirs = VARIANTS[name]
    torch.manual_seed(3)
    logs = (-3 * torch.rand(ANSWERS, LENGTH)).requires_grad_()
    old = logs.detach() + 0.3 * torch.randn(ANSWERS, LENGTH)
    sampled, reference = (old + 0.2 * torch.randn(ANSWERS, LENGTH) for _ in range(2))
    advantages = torch.randn(ANSWERS)
    lengths = torch.tensor([9, 1, 4, 7, 2, 9])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    weights = torch.exp((old - sampled) * mask).clamp(max=1.1)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logs, torch.zeros_like(logs), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=theirs.get("level", "token"),
        beta=theirs.get("beta", 0.0),
        loss_type=theirs["loss_type"],
        epsilon_low=0.2,
        epsilon_high=theirs.get("high", 0.2),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        use_vllm="vllm" in theirs,
        vllm_importance_sampling_correction=True,
        max_completion_length=LONGEST,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x, sync_gradients=True
        ),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(ANSWERS, 1, dtype=torch.long),
        "prompt_mask": torch.ones(ANSWERS, 1),
        "completion_ids": torch.zeros(ANSWERS, LENGTH, dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "importance_sampling_ratio": weights,
        "num_items_in_batch": mask.sum(),
    }
    expected = GRPOTrainer._compute_loss(trainer, None, inputs)
    expected.backward()
    gradient, logs.grad = logs.grad, None
    section = new_section("objective", "grpo", updates=2, **ours)
    stored = {
        "sampled": sampled if "vllm" in theirs else old,
        "old": old,
        "reference": reference,
        "advantages": advantages,
        "divisors": torch.from_numpy(divisors_of(section, lengths.numpy())),
        "mean_tokens": torch.full((ANSWERS,), float(lengths.float().mean())),
    }
    beside = {"documents": torch.zeros_like(mask), "stored": stored}
    labels = torch.where(mask.bool(), 1, IGNORED_LABEL)
    loss, measures = ObjectiveLoss(section)(logs, labels, beside)
    (loss / ANSWERS).backward()
    assert loss.item() / ANSWERS == pytest.approx(expected.item(), rel=1e-6), name
    torch.testing.assert_close(logs.grad, gradient, rtol=1e-5, atol=1e-8)
    if name == "importance":
        difference = (old - sampled)[mask.bool()]
        kl = float((difference.exp() - 1 - difference).mean())
        share = float((difference.abs() > section.mismatch_limit).float().mean())
        assert measures[:, -2:].mean(dim=0).tolist() == pytest.approx([kl, share], rel=1e-5)
    recorded = trainer._metrics["train"]
    (clipped,) = recorded["clip_ratio/region_mean"]
    assert float(measures[:, 3].mean()) == pytest.approx(clipped, rel=1e-5)
    if "kl" in recorded:
        assert float(measures[:, 4].mean()) == pytest.approx(recorded["kl"][0], rel=1e-5)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


def records(run: RunPaths, kind: str) -> list[dict]:
    return [each for each in read_events(run.events) if each["event"] == kind]


@pytest.mark.slow
def test_every_layout_has_one_curve(prompts, tmp_path):
    """Answers, rewards and gradients: also those of two updates, and of replaced prompts."""
    further = {
        "objective__updates": 2,
        "objective__dynamic_sampling": 2,
        "objective__clip_high": 1e-3,
    }
    layouts = {
        "alone": (1, {"zero_stage__stage": 0}),
        "zero 3": (2, {"zero_stage__stage": 3}),
        "tensor": (2, {"zero_stage__stage": 1, "parallelism__tensor": 2}),
        "further alone": (1, {"zero_stage__stage": 0, **further, **ADAPTER}),
        "further, zero 2": (2, {"zero_stage__stage": 2, **further, **ADAPTER}),
    }
    runs = {name: RunPaths(tmp_path / name) for name in layouts}
    for size in (1, 2):
        cases = [
            Case(tiny_plan(sampling(prompts, steps=3, **changes), size), runs[name])
            for name, (processes, changes) in layouts.items()
            if processes == size
        ]
        train_cases(size, cases, together=True)
    for name, run in runs.items():
        alone = runs["further alone" if name.startswith("further") else "alone"]
        for kind in ("step", "evaluation"):
            for one, other in zip(records(run, kind), records(alone, kind), strict=True):
                assert one["loss"] == pytest.approx(other["loss"], abs=1e-5), (name, kind)
                assert one["objective"] == pytest.approx(other["objective"], abs=1e-5), (name, kind)
        assert rollout_steps(run) == list(curve(alone))
        for step, (_, norm) in curve(alone).items():
            texts = [
                [
                    (each["prompt"], each["answer"], each["rewards"])
                    for each in read_rollouts(of, step)
                ]
                for of in (run, alone)
            ]
            assert len(texts[0]) == BATCH and texts[0] == texts[1], (name, step)
            assert curve(run)[step][1] == pytest.approx(norm, rel=1e-4), (name, step)
        assert max(each["objective"]["mismatch"] for each in records(run, "step")) < 1e-5, name
    steps = records(runs["further alone"], "step")
    assert steps[0]["samples"][1] > BATCH  # it has replaced some prompts
    assert max(each["objective"]["kl"] for each in steps) > 0
    assert any(each["objective"]["clipped"] for each in steps)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_answers(prompts, tmp_path):
    whole = whole_run(tmp_path / "whole", prompts, "zero 3")
    found = trial(tmp_path / "killed", prompts, "zero 3", whole, seed=1)
    assert len(found["killed"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"normalize_by": NormalizeBy.tokens}, {"loss_type": "dapo"}),
        ({"updates": 2}, {"loss_type": "grpo", "steps_per_generation": 2}),
    ],
)
def test_the_curve_matches_trl(prompts, tmp_path, ours, theirs):
    steps, rate, updates = 20, 1e-3, ours.get("updates", 1)
    config = sampling(
        prompts,
        steps=steps,
        evaluation_samples=0,
        evaluate_every_steps=None,
        optimizer__lr=rate,
        optimizer__weight_decay=0.0,
        schedule__kind="constant",
        checkpoint__every_steps=None,
        model__initial_weights=str(tmp_path / "model"),
        zero_stage__stage=0,
        **{f"objective__{name}": value for name, value in ours.items()},
    )
    torch.manual_seed(1)
    model = skeleton(config.model, torch.float32)
    type(model)(model.config).save_pretrained(tmp_path / "model")
    run = trained(tmp_path / "run", config)
    rollouts = tmp_path / "rollouts.json"
    rollouts.write_text(
        json.dumps([as_trl(folder) for folder in sorted(run.rollouts.glob("step-*-*"))])
    )
    options = {
        "per_device_train_batch_size": BATCH,
        "num_generations": SAMPLES,
        "max_completion_length": 16,
        "beta": 0.0,
        **theirs,
    }
    theirs = train_with_trl("grpo", tmp_path / "model", rollouts, steps=steps, rate=rate, **options)
    ours = records(run, "step")
    compare_steps(ours, theirs)
    for number, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        if updates == 1:
            assert our["objective"]["reward"] == pytest.approx(their["reward"], abs=1e-5), number
            entropy = our["objective"]["answer_tokens"]
            assert entropy == pytest.approx(their["completions/mean_length"]), number
    assert sum(each["grad_norm"] > 0.1 for each in ours) > steps // 2


def as_trl(folder: Path) -> dict[str, list]:
    """Return the answers of a kept phase as TRL's `rollout_func` gives them."""
    phase = json.loads((folder / "phase.json").read_text())
    known = read_answers(folder)
    answers = [(phase["prompts"][str(key[0])], known[tuple(key)]) for key in phase["answers"]]
    return {
        "prompt_ids": [prompt for prompt, _ in answers],
        "completion_ids": [fields["ids"].tolist() for _, fields in answers],
        "logprobs": [fields["sampled"].tolist() for _, fields in answers],
        "given_reward": [
            fields["rewards"]["digit"] + 0.5 * fields["rewards"]["short"] for _, fields in answers
        ],
    }


def test_a_line_that_a_kill_cut_off_is_left_out_and_the_next_is_read(tmp_path):
    folder = tmp_path / folder_name(4, {"weights": [1.0, 2.0]})
    ids, logs = np.array([5, 256]), np.array([-0.1, -1e-7], np.float32)
    writer = AnswerWriter(folder, 0)
    writer.add((3, 1), ids=ids, sampled=logs, is_finished=True)
    writer.close()
    with (folder / "rank-0.jsonl").open("ab") as file:
        file.write(b'{"prompt": 3, "sample": 2, "ids": "BQ')
    again = AnswerWriter(folder, 0)
    again.add((3, 1), rewards={"digit": None})
    again.close()
    (key, fields), *others = read_answers(folder).items()
    assert not others and key == (3, 1) and fields["is_finished"]
    assert fields["ids"].tolist() == ids.tolist() and fields["rewards"] == {"digit": None}
    assert fields["sampled"].tobytes() == logs.tobytes()  # the trainer gets the same bits


def test_answers_of_other_weights_are_not_used_and_go(tmp_path):
    one, other = (folder_name(4, {"weights": [number, 2.0]}) for number in (1.0, 1.0 + 2**-52))
    assert one != other
    names = [folder_name(2, {}), folder_name(3, {}), one, other, folder_name(5, {}), "notes"]
    for name in names:
        (tmp_path / name).mkdir()
    drop_phases(tmp_path, tmp_path / one, before=3)
    assert {path.name for path in tmp_path.iterdir()} == {*names} - {names[0], other}


@pytest.mark.slow
def test_a_mismatch_above_its_limit_ends_the_run_with_the_likely_cause(prompts, tmp_path):
    config = sampling(prompts, zero_stage__stage=0, objective__mismatch_limit=1e-12)
    with pytest.raises(RanksFailed, match=r"mismatch_limit=1e-12[\s\S]*precision.compute=fp32"):
        trained(tmp_path / "run", config)
    assert records(RunPaths(tmp_path / "run"), "step") == []
