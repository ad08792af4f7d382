"""Objectives with a head of their own: one curve on every layout, and transformers' own classes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from chat_files import write_tokenizer
from fabricated import fabricate
from rank_processes import (
    SECONDS,
    Case,
    curve,
    server,
    tiny_config,
    tiny_plan,
    train_cases,
    trained,
    with_stop,
)
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl_trainers import compare_steps, train_with_trl

from trainctl.config.registry import new_section
from trainctl.data.targets import check_labels
from trainctl.data.tokenizer import load_tokenizer
from trainctl.engines.micro_batch import IGNORED_LABEL
from trainctl.errors import TrainctlError
from trainctl.options.objective import objective_of
from trainctl.options.objective.classify import Labelling
from trainctl.plans.shapes import all_tensors, count_parameters
from trainctl.plans.trainable import head_name
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.export.adapter import export_adapter
from trainctl.train.export.check import check_adapter, check_directory
from trainctl.train.export.directory import export, write_all_but_weights
from trainctl.train.models.frozen_base import FullModel, initial_base
from trainctl.train.models.model import skeleton, whole_pieces
from trainctl.train.models.weights import SeedWeights
from trainctl.train.objectives.base import ObjectiveLoss

LENGTH, PAIRS = 64, 40
END, PAD = 256, 257
ADAPTER = {"adapter__kind": "lora", "adapter__rank": 4}
RECORDS = {
    "steps": 6,
    "sequence_length": LENGTH,
    "evaluate_every_steps": 3,
    "precision__compute": "fp32",
    "optimizer__lr": 3e-3,
    "schedule__warmup_fraction": 0.0,
    "data__held_out_fraction": 0.2,
    "data__mask_documents": True,
    "data__on_too_long": "drop",
    "data__packing": "best_fit",
    "data__max_bytes": None,
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums, the right one preferred; half of them by a margin."""
    dice, file = random.Random(3), tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = []
    for number in range(PAIRS):
        a, b = dice.randrange(10 ** dice.randrange(1, 5)), dice.randrange(100)
        row = {"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"about {a}"}
        rows.append(row | ({"margin": dice.random()} if number % 2 else {}))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def rewarding(pairs: Path, **changes):
    """Build a tiny configuration of a reward model."""
    here = {
        "objective__kind": "reward",
        "objective__centering": 0.01,
        "model__score_outputs": 1,
        "data__kind": "preferences",
        "data__paths": [str(pairs)],
    }
    return tiny_config(**RECORDS | here | changes)


def records(run: RunPaths, kind: str) -> list[dict]:
    return [each for each in read_events(run.events) if each["event"] == kind]


@pytest.mark.slow
def test_every_layout_has_one_curve_and_a_run_goes_on_elsewhere(pairs, tmp_path):
    layouts = {
        "alone": (1, {"zero_stage__stage": 0}),
        "zero 1": (2, {"zero_stage__stage": 1}),
        "zero 3": (2, {"zero_stage__stage": 3, "activation_checkpointing__mode": "full"}),
        "tensor": (2, {"zero_stage__stage": 2, "parallelism__tensor": 2}),
        "adapter alone": (1, {"zero_stage__stage": 0, **ADAPTER}),
        "adapter, zero 3": (2, {"zero_stage__stage": 3, **ADAPTER}),
    }
    plans = {
        name: tiny_plan(rewarding(pairs, **changes), processes)
        for name, (processes, changes) in layouts.items()
    }
    runs = {name: RunPaths(tmp_path / name) for name in layouts}
    resumed = RunPaths(tmp_path / "resumed")
    for size in (1, 2):
        here = [name for name, (processes, _) in layouts.items() if processes == size]
        cases = [Case(plans[name], runs[name]) for name in here]
        cases += [Case(with_stop(plans["zero 3"], 3), resumed)] if size == 2 else []
        train_cases(size, cases, together=True)
    train_cases(1, [Case(plans["alone"], resumed, 2)])
    for name in (*layouts, "resumed"):
        run = resumed if name == "resumed" else runs[name]
        alone = runs["adapter alone" if name.startswith("adapter") else "alone"]
        for kind in ("step", "evaluation"):
            for one, other in zip(records(run, kind), records(alone, kind), strict=True):
                assert one["loss"] == pytest.approx(other["loss"], abs=1e-5), (name, kind)
                assert one["objective"] == pytest.approx(other["objective"], abs=2e-5), name
        for step, (_, norm) in curve(alone).items():
            assert curve(run)[step][1] == pytest.approx(norm, rel=1e-4), (name, step)
    last = records(runs["alone"], "step")[-1]
    assert last["loss"] < 0.6 and last["objective"]["accuracy"] == 1


def scores_by(
    run: RunPaths, checkpoint: Path, prompt: str, *answers: str
) -> list[dict[str, float]]:
    """Return what `sample --score` prints, of a forked process with everything imported."""
    where = {"run": str(run.root), "checkpoint": str(checkpoint)}
    words = ["score", json.dumps({**where, "prompt": prompt, "answers": answers, "chat": False})]
    ((code, answer),) = server().run("offline_probe:answer", words, 1, SECONDS)
    assert code == 0, answer
    return [each["scores"] for each in json.loads(answer)["result"]["scored"]]


def save_model(config, folder: Path) -> str:
    """Write a language model with weights of transformers' own drawing."""
    torch.manual_seed(1)
    config.model.score_outputs, outputs = None, config.model.score_outputs
    model = skeleton(config.model, torch.float32)
    type(model)(model.config).save_pretrained(folder)
    config.model.score_outputs = outputs
    return str(folder)


ALIKE = {
    "steps": 20,
    "gradient_accumulation_steps": 1,
    "evaluation_samples": 0,
    "evaluate_every_steps": None,
    "optimizer__weight_decay": 0.0,
    "schedule__kind": "constant",
    "data__shuffle": False,
    "data__held_out_fraction": 0.0,
    "zero_stage__stage": 0,
}


@pytest.mark.slow
def test_the_curve_is_trls_and_the_export_is_transformers(pairs, tmp_path):
    rate = 1e-3
    config = rewarding(pairs, **ALIKE, optimizer__lr=rate)
    config.model.initial_weights = save_model(config, tmp_path / "model")
    # TRL draws the head from another generator: let it start from ours.
    start = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
    start.save_pretrained(tmp_path / "start")
    config.model.initial_weights = str(tmp_path / "start")
    whole = tmp_path / "pairs.jsonl"
    rows = [{"margin": 0.0, **json.loads(line)} for line in pairs.read_text().splitlines()]
    whole.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = trained(tmp_path / "run", config)
    options = {"center_rewards_coefficient": 0.01}
    theirs = train_with_trl("reward", tmp_path / "start", whole, steps=20, rate=rate, **options)
    ours = records(run, "step")
    compare_steps(ours, theirs)
    for number, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        found = our["objective"]
        assert found["margin"] == pytest.approx(their["margin"], abs=1e-3), number
        assert found["accuracy"] == pytest.approx(their["accuracy"]), number
    (checkpoint,) = sorted((run.root / "checkpoints").glob("step-*"))[-1:]
    export(config, checkpoint, tmp_path / "out", dtype=torch.float32)
    checked = check_directory(config, checkpoint, tmp_path / "out", dtype=torch.float32)
    assert not checked.differences and checked.scores >= 2
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    facts = loaded.config
    assert (facts.pad_token_id, facts.problem_type, facts.id2label) == (
        PAD,
        "regression",
        {0: "reward"},
    )
    scored = scores_by(run, checkpoint, "1+1=", "2", "3")
    texts = [[*b"1+1=2", END], [*b"10+10=20", END]]
    alone = [loaded(input_ids=torch.tensor([each])).logits.item() for each in texts]
    assert scored[0]["reward"] == pytest.approx(alone[0], abs=1e-5) != scored[1]["reward"]
    padded = torch.tensor([[*texts[0], PAD, PAD, PAD], texts[1]])
    assert loaded(input_ids=padded).logits.flatten().tolist() == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(
    ("pad", "rows", "padding"),
    [
        ("<pad>", 300, "<pad>"),
        (None, 300, "<|pad|>"),
        ("<|im_end|>", 300, "<|pad|>"),
        ("<|im_end|>", None, "<s>"),
    ],
)
def test_an_exported_tokenizer_pads_with_what_the_model_expects(pad, rows, padding, tmp_path):
    """A text ends with `<|im_end|>`; the tokenizer may pad with it, too, or with nothing."""
    settings = write_tokenizer(tmp_path / "from") / "tokenizer_config.json"
    facts = {**json.loads(settings.read_text()), "pad_token": pad}
    settings.write_text(json.dumps({name: value for name, value in facts.items() if value}))
    config = tiny_config(objective__kind="classify", model__score_outputs=2)
    config.tokenizer = new_section("tokenizer", "hf", path=str(tmp_path / "from"))
    config.model.vocab_size = rows or load_tokenizer(config.tokenizer).vocab_size
    torch.manual_seed(0)
    (made := tmp_path / "made").mkdir()
    model = type(skeleton(config.model, torch.float32))(
        skeleton(config.model, torch.float32).config
    )
    notes = write_all_but_weights(model, config, torch.float32, made)
    save_file(model.state_dict(), made / "model.safetensors", {"format": "pt"})
    assert not notes
    loaded = AutoModelForSequenceClassification.from_pretrained(made).eval()
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert tokenizer.pad_token == padding and loaded.config.pad_token_id == tokenizer.pad_token_id
    texts = ["1+1=2<|im_end|>", "a longer text<|im_end|>"]
    with torch.no_grad():
        alone = [loaded(**tokenizer(text, return_tensors="pt")).logits for text in texts]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        torch.testing.assert_close(loaded(**batch).logits, torch.cat(alone))


@pytest.mark.slow
def test_an_adapter_trains_a_new_head_which_peft_loads(pairs, tmp_path):
    config = rewarding(pairs, **ADAPTER, zero_stage__stage=0)
    config.model.initial_weights = save_model(config, tmp_path / "model")
    run = trained(tmp_path / "run", config)
    (checkpoint,) = sorted((run.root / "checkpoints").glob("step-*"))[-1:]
    export_adapter(config, checkpoint, tmp_path / "out", dtype=torch.float32)
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (written["task_type"], written["modules_to_save"]) == ("SEQ_CLS", ["score"])
    checked = check_adapter(config, checkpoint, tmp_path / "out", dtype=torch.float32)
    assert not checked.differences and checked.scores


PROBLEMS = {
    "single_label_classification": {
        "objective__class_weights": [1.0, 2.0, 0.5],
        "objective__label_smoothing": 0.1,
    },
    "multi_label_classification": {},
    "regression": {"objective__outputs": 1, "model__score_outputs": 1},
}


def texts_of(problem: str, folder: Path) -> list[tuple[str, list]]:
    """Write texts whose label is their first letter, several letters, or the length."""
    dice = random.Random(5)
    rows = []
    for _ in range(PAIRS):
        text = "".join(dice.choice("abc ") for _ in range(dice.randrange(4, 30)))
        letters = ["abc".index(letter) for letter in sorted({*text} & {*"abc"})]
        first = "abc".index(text.replace(" ", "a")[0])
        label = {"single": first, "multi_": letters, "regres": len(text) / 30}[problem[:6]]
        rows.append((text, label))
    named = "abc".__getitem__ if problem.startswith("single") else lambda label: label
    lines = [json.dumps({"text": text, "label": named(label)}) + "\n" for text, label in rows]
    (folder / f"{problem}.jsonl").write_text("".join(lines))
    return rows


def classifying(problem: str, folder: Path, **changes):
    """Build a tiny configuration of a classifier."""
    values = {
        "objective__kind": "classify",
        "objective__problem": problem,
        "objective__outputs": 3,
        "model__score_outputs": 3,
        "data__kind": "labelled",
        "data__paths": [str(folder / f"{problem}.jsonl")],
        **PROBLEMS[problem],
    }
    return tiny_config(**RECORDS | values | changes)


def plain_losses(config, rows) -> list[float]:
    """Train by a plain loop over transformers' own class; return the losses."""
    outputs, problem = config.model.score_outputs, config.objective.problem.value
    model = AutoModelForSequenceClassification.from_pretrained(
        config.model.initial_weights, num_labels=outputs, problem_type=problem, pad_token_id=PAD
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.optimizer.lr, betas=(0.9, 0.95), weight_decay=0.0
    )
    losses = []
    for step in range(config.training.steps):
        batch = [rows[(8 * step + place) % len(rows)] for place in range(8)]
        ids = [torch.tensor([*text.encode(), END]) for text, _ in batch]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD)
        labels = [label for _, label in batch]
        if problem.startswith("multi"):
            hot = [[float(n in label) for n in range(outputs)] for label in labels]
            loss = model(input_ids=padded, labels=torch.tensor(hot)).loss
        elif problem == "regression":
            loss = model(input_ids=padded, labels=torch.tensor(labels)).loss
        else:
            loss = F.cross_entropy(
                model(input_ids=padded).logits,
                torch.tensor(labels),
                weight=torch.tensor(config.objective.class_weights),
                label_smoothing=config.objective.label_smoothing,
                reduction="none",
            ).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_a_classifiers_curve_is_that_of_a_plain_loop(tmp_path):
    configs, rows = {}, {}
    for problem in PROBLEMS:
        rows[problem] = texts_of(problem, tmp_path)
        config = classifying(problem, tmp_path, **ALIKE, optimizer__lr=1e-3)
        config.model.initial_weights = save_model(config, tmp_path / "model")
        outputs = config.model.score_outputs
        start = AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "model", num_labels=outputs
        )
        config.model.initial_weights = str(tmp_path / f"start-{problem}")
        start.save_pretrained(config.model.initial_weights)
        configs[problem] = config
    runs = {problem: RunPaths(tmp_path / f"run-{problem}") for problem in PROBLEMS}
    cases = [Case(tiny_plan(configs[problem], 1), runs[problem]) for problem in PROBLEMS]
    train_cases(1, cases, together=True)
    for problem in PROBLEMS:
        ours = [each["loss"] for each in records(runs[problem], "step")]
        assert ours == pytest.approx(plain_losses(configs[problem], rows[problem]), abs=1e-4), (
            problem
        )
    problem = next(iter(PROBLEMS))
    (checkpoint,) = sorted((runs[problem].root / "checkpoints").glob("step-*"))[-1:]
    export(configs[problem], checkpoint, tmp_path / "out", dtype=torch.float32)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["id2label"] == {"0": "a", "1": "b", "2": "c"}
    (found,) = scores_by(runs[problem], checkpoint, "aaa")
    assert max(found, key=found.get) == "a"
    assert sum(found.values()) == pytest.approx(1)
    # Each step of a class has a metric, whatever the layout: sums over ranks, not means of them.
    single = {"steps": 3, "optimizer__lr": 1e-3, "global_batch_size": 12}
    plans = [
        tiny_plan(classifying(problem, tmp_path, **single, **more), size)
        for size, more in ((1, {"zero_stage__stage": 0}), (2, {"zero_stage__stage": 3}))
    ]
    found = [RunPaths(tmp_path / str(size)) for size in (1, 2)]
    for size, plan, run in zip((1, 2), plans, found, strict=True):
        train_cases(size, [Case(plan, run)])
    for kind in ("step", "evaluation"):
        for one, other in zip(*(records(run, kind) for run in found), strict=True):
            assert one["objective"] == pytest.approx(other["objective"], abs=1e-6)
            assert set(one["objective"]) == {"accuracy", "f1", "f1_0", "f1_1", "f1_2"}


ALONE: Any = SimpleNamespace(
    rank=0,
    world_size=1,
    is_first=True,
    gather=lambda value: [value],
    broadcast_from_first=lambda value: value,
)
"""This process, without a process group."""


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen3"])
def test_a_head_is_counted_as_transformers_names_it(family: str) -> None:
    config = tiny_config(model__family=family)
    config.model.score_outputs, config.model.tie_word_embeddings = 3, True
    made = skeleton(config.model, torch.float32)
    names = {name: tuple(p.shape) for name, p in made.named_parameters()}
    assert names == {each.name: each.shape for each in all_tensors(config.model)}
    assert type(made).__name__.endswith("ForSequenceClassification")
    counted = count_parameters(config.model)
    assert (counted.head, counted.total) == (3 * 64, sum(p.numel() for p in made.parameters()))
    assert [piece.is_head for piece in whole_pieces(made).values()].count(True) == 1
    assert head_name(config.model) == "score.weight"


def test_a_new_head_starts_on_any_weights_of_its_decoder(tmp_path: Path) -> None:
    """From the seed, a run of a language model, and a run of a head of another size."""
    config = tiny_config()
    config.model.score_outputs = 3
    made = skeleton(config.model, torch.float32)
    whole = FullModel.of(config.model, made)
    drawn = SeedWeights.of(config.model, made, config.training.seed)
    for name, outputs in (("language", None), ("reward", 1), ("same", 3)):
        run = RunPaths(tmp_path / name)
        fabricate(run, replace(config.model, score_outputs=outputs))
        config.model.initial_weights = str(run.root)
        source = initial_base(whole, config, run, ALONE).source
        for name_of, parameter in made.named_parameters():
            count = parameter.numel()
            found = source.read(name_of, parameter.shape, 0, count)
            seeds = drawn.read(name_of, parameter.shape, 0, count)
            is_new = name_of == "score.weight" and outputs != 3
            assert torch.equal(found, seeds) == is_new, (name, name_of)


def losses_of(kind: str, scores, labels, documents, targets, **values):
    section = new_section("objective", kind, **values)
    return ObjectiveLoss(section)(scores, labels, {"documents": documents, "targets": targets})


def test_losses_of_scores_match_their_formulas():
    torch.manual_seed(0)
    scores = torch.randn(3, 6, 1, requires_grad=True)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 2, 2], [0] * 6])
    labels = torch.ones(3, 6, dtype=torch.long)
    labels[2] = IGNORED_LABEL  # the padding of a last batch
    margins = torch.tensor([[0.3], [float("nan")], [float("nan")]])
    loss, measured = losses_of("reward", scores, labels, documents, margins, centering=0.1)
    chosen, rejected = scores[[0, 1], [2, 0], 0], scores[[0, 1], [4, 3], 0]
    wanted = -F.logsigmoid(chosen - rejected - torch.tensor([0.3, 0.0]))
    wanted = wanted + 0.1 * (chosen + rejected).square()
    assert loss.item() == pytest.approx(wanted.sum().item(), rel=1e-6)
    assert measured[:2, 0].tolist() == pytest.approx(chosen.tolist())
    assert measured[2].tolist() == [0.0] * 4
    loss.backward()
    assert (scores.grad[0, [0, 1, 3, 5]] == 0).all() and (scores.grad[2] == 0).all()
    labels = torch.full((2, 6), IGNORED_LABEL)
    labels[0, [1, 4]] = labels[1, 5] = 7
    steps = torch.tensor([[1.0, 0.0], [0.5, float("nan")]])
    loss, _ = losses_of("process_reward", scores[:2], labels, documents[:2], steps)
    logits, wanted = scores[[0, 0, 1], [1, 4, 5], 0], torch.tensor([1.0, 0.0, 0.5])
    expected = F.binary_cross_entropy_with_logits(logits, wanted, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_f1_follows_from_sums():
    section = new_section("objective", "classify", outputs=4)
    spec = objective_of(section)
    assert len(spec.measures_of(section)) == 1 + 3 * 4
    # Class 3 has no text and is never predicted: it is not in the mean, as scikit-learn's.
    sums = [5.0, *(3.0, 1.0, 1.0, 0.0), *(4.0, 2.0, 2.0, 0.0), *(4.0, 3.0, 1.0, 0.0)]
    found = spec.record(section, sums, 8)
    assert found["accuracy"] == 5 / 8
    wanted = [6 / 8, 2 / 5, 2 / 3, 0.0]
    assert [found[f"f1_{n}"] for n in range(4)] == pytest.approx(wanted)
    assert found["f1"] == pytest.approx(sum(wanted) / 3)


@pytest.mark.parametrize(
    ("values", "rows", "said"),
    [
        ({"outputs": 2}, [[0], [2]], r"class 2, and objective\.outputs=2 numbers them from 0"),
        ({"outputs": 2}, [[0.5]], r"a label is 0\.5"),
        ({"outputs": 3}, [[0, 1]], "not one class"),
        ({"outputs": 1, "problem": Labelling.regression}, [[0.1, 0.2]], "2 numbers to predict"),
    ],
)
def test_labels_that_no_output_has_are_refused_before_a_start(values, rows, said):
    with pytest.raises(TrainctlError, match=said):
        check_labels(new_section("objective", "classify", **values), np.float32(rows))


def test_text_is_not_predicted_as_a_number():
    section = new_section("objective", "classify", outputs=1, problem=Labelling.regression)
    with pytest.raises(TrainctlError, match=r"labels are text \('3\.5'\)"):
        check_labels(section, np.float32([[0], [1]]), ("3.5", "4.5"))
