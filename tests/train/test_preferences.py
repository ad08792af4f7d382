"""Pairs of answers: what a sample of them is, and one curve on every layout, which is TRL's."""

from __future__ import annotations

import json
import math
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from chat_files import asked, write_tokenizer
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, trained, with_stop
from trl_trainers import compare_steps, train_with_trl

from trainctl.config.registry import new_section
from trainctl.config.schema import OnBadText
from trainctl.data.corpora import load_corpora
from trainctl.data.prepare import prepare
from trainctl.data.record_encoders import PreferenceEncoder
from trainctl.data.token_arrays import loss_mask_of, marked_vocab_size, without_marks
from trainctl.data.tokenizer import ByteTokenizer, FileTokenizer
from trainctl.engines.micro_batch import IGNORED_LABEL
from trainctl.errors import TrainctlError
from trainctl.options.objective.dpo import PreferenceLoss
from trainctl.plans.mixture import SINGLE_SOURCE
from trainctl.readers.conversations import as_text, pair_of
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.data import TrainingData, held_out_data
from trainctl.train.models.model import skeleton
from trainctl.train.objectives.base import ObjectiveLoss
from trainctl.train.objectives.preferences import (
    attach_saved_reference,
    reference_identity,
    write_reference,
)

LENGTH, PAIRS, END = 64, 48, 256
ADAPTER = {"adapter__kind": "lora", "adapter__rank": 4}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums, the right one preferred; two of the pairs are longer than a sample."""
    dice, file = random.Random(3), tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = []
    for _ in range(PAIRS):
        a, b = dice.randrange(10 ** dice.randrange(1, 5)), dice.randrange(100)
        rows.append({"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"about {a}"})
    long = {"prompt": "a" * 40, "chosen": "b", "rejected": "c"}
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, long, long]))
    return file


def preferring(pairs: Path, **changes):
    """Build a tiny configuration that trains by DPO on the file of pairs."""
    return tiny_config(
        **{
            "steps": 6,
            "sequence_length": LENGTH,
            "evaluate_every_steps": 3,
            "sample_tokens": 0,
            "precision__compute": "fp32",
            "optimizer__lr": 3e-3,
            "schedule__warmup_fraction": 0.0,
            "objective__kind": "dpo",
            "data__kind": "preferences",
            "data__paths": [str(pairs)],
            "data__held_out_fraction": 0.2,
            "data__mask_documents": True,
            "data__on_too_long": "drop",
            "data__packing": "best_fit",
            "data__max_bytes": None,
            **changes,
        }
    )


def records(run: RunPaths, kind: str) -> list[dict]:
    return [each for each in read_events(run.events) if each["event"] == kind]


def test_a_sample_is_one_pair_and_one_too_long_is_left_out(pairs, tmp_path):
    plan = tiny_plan(preferring(pairs, data__shuffle=False), 1)
    run = RunPaths(tmp_path)
    prepare(plan, run)
    corpora = load_corpora(run.corpus, plan.config.data)
    data = TrainingData.of(plan, corpora, data_rank=0, data_size=1)
    held_out = held_out_data(plan, corpora)[SINGLE_SOURCE]
    (dataset,) = data.datasets.values()
    assert dataset.num_samples + held_out.num_samples == PAIRS
    batch = dataset.micro_batch(np.array([0, -1]))
    assert batch.counts_records and batch.is_masked and batch.num_counted == 1
    row = json.loads(pairs.read_text().splitlines()[0])
    ids = [[*f"{row['prompt']}{row[key]}".encode(), END] for key in ("chosen", "rejected")]
    first, both = len(ids[0]), len(ids[0]) + len(ids[1])
    assert batch.input_ids[0, :both].tolist() == [*ids[0], *ids[1]]
    assert batch.document_ids[0, :both].tolist() == [0] * first + [1] * len(ids[1])
    assert (batch.document_ids[0, both:] > 1).all()
    assert batch.position_ids[0, [0, first - 1, first]].tolist() == [0, first - 1, 0]
    learnt = batch.labels[0][batch.labels[0] != IGNORED_LABEL].tolist()
    assert learnt == [*row["chosen"].encode(), END, *row["rejected"].encode(), END]
    assert (batch.labels[1] == IGNORED_LABEL).all()


def test_reference_losses_of_other_pairs_are_not_used(pairs, tmp_path):
    """The other file has as many pairs, with other answers: only its digest differs."""
    others = tmp_path / "others.jsonl"
    others.write_text(pairs.read_text().replace("about", "maybe"))
    kept = []
    for name, file in (("own", pairs), ("other", others)):
        run = RunPaths(tmp_path / name)
        run.root.mkdir()
        plan = tiny_plan(preferring(file), 1)
        prepare(plan, run)
        corpora = load_corpora(run.corpus, plan.config.data)
        held_out = held_out_data(plan, corpora)
        count = held_out[SINGLE_SOURCE].num_samples
        numbers = {"train": PAIRS - count, "held_out": count}
        zeros = {side: np.zeros((size, 2), np.float32) for side, size in numbers.items()}
        write_reference(run, zeros, reference_identity(corpora, numbers))
        attach_saved_reference(run, corpora, held_out)
        assert held_out[SINGLE_SOURCE].stored["reference"].shape == (count, 2)
        kept.append((run, corpora, held_out))
    (own, corpora, held_out), (other, *_) = kept
    own.reference.write_bytes(other.reference.read_bytes())
    with pytest.raises(TrainctlError, match=r"no reference\.npz of these pairs"):
        attach_saved_reference(own, corpora, held_out)


def test_messages_are_written_by_the_chat_template(tmp_path):
    """An answer is the text that the template adds to the prompt, as in TRL."""
    from transformers import AutoTokenizer

    folder = write_tokenizer(tmp_path, adds_bos=True)
    tokenizer = FileTokenizer(folder / "tokenizer.json")
    prompt = asked(("1+1?", "2"))[:1]
    answers = {key: [{"role": "assistant", "content": key}] for key in ("chosen", "rejected")}
    encoder = PreferenceEncoder(new_section("data", "preferences"), tokenizer)
    (found,) = encoder.encode_all([as_text(pair_of({"prompt": prompt, **answers}))])
    theirs = AutoTokenizer.from_pretrained(str(folder))
    write = partial(theirs.apply_chat_template, return_dict=False)
    asks = write(prompt, add_generation_prompt=True)
    whole = [write([*prompt, *answer]) for answer in answers.values()]
    is_wide = marked_vocab_size(tokenizer.vocab_size) > 1 << 16
    stored = found.astype("<u4" if is_wide else "<u2")  # as a store has them
    assert without_marks(stored).tolist() == [*whole[0], *whole[1]]
    learnt = [place >= len(asks) for each in whole for place in range(len(each))]
    assert loss_mask_of(stored).tolist() == learnt
    with pytest.raises(TrainctlError, match="no chat template belongs to it"):
        PreferenceEncoder(new_section("data", "preferences"), ByteTokenizer()).encode_all(
            [as_text(pair_of({"prompt": prompt, **answers}))]
        )


def test_a_pair_of_which_no_token_is_left_is_bad(monkeypatch):
    tokenizer = ByteTokenizer()
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text: encode(text.strip()))
    pair = [as_text(pair_of({"prompt": "a", "chosen": "\n", "rejected": "b"}))]
    (found,) = PreferenceEncoder(new_section("data", "preferences"), tokenizer).encode_all(pair)
    assert without_marks(found.astype("<u2")).tolist() == [97, END, 97, 98, END]
    monkeypatch.setattr(tokenizer, "end_of_document", None)
    with pytest.raises(TrainctlError, match="no token for a text of the record that begins 'a'"):
        PreferenceEncoder(new_section("data", "preferences"), tokenizer).encode_all(pair)
    skips = new_section("data", "preferences", on_bad_text=OnBadText.skip)
    (found,) = PreferenceEncoder(skips, tokenizer).encode_all(pair)
    assert not len(found)


def test_losses_match_their_papers():
    torch.manual_seed(0)
    labels = torch.full((2, 9), IGNORED_LABEL)
    labels[0, 1:3] = labels[0, 5:8] = labels[1, 2:4] = 1  # the second has one answer: no pair
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]] * 2)
    logs = -torch.rand(2, 9)
    chosen, rejected = logs[0, 1:3].sum(), logs[0, 5:8].sum()
    reference = torch.tensor([[-1.0, -0.5], [0.0, 0.0]])
    margin = 0.3 * (chosen + 1.0 - rejected - 0.5)
    means = chosen / 2, rejected / 3
    log_odds = [mean - torch.log(1 - mean.exp()) for mean in means]
    smoothed = -0.9 * F.logsigmoid(margin) - 0.1 * F.logsigmoid(-margin)
    ipo = ((chosen + 1) / 2 - (rejected + 0.5) / 3 - 1 / 0.6) ** 2
    for kind, values, expected in (
        ("dpo", {"beta": 0.3}, -F.logsigmoid(margin)),
        ("dpo", {"beta": 0.3, "label_smoothing": 0.1}, smoothed),
        ("dpo", {"beta": 0.3, "loss": PreferenceLoss.hinge}, 1 - margin),
        ("dpo", {"beta": 0.3, "loss": PreferenceLoss.ipo}, ipo),
        ("simpo", {}, -F.logsigmoid(2 * (means[0] - means[1]) - 1)),
        ("orpo", {}, -means[0] - 0.1 * F.logsigmoid(log_odds[0] - log_odds[1])),
    ):
        section = new_section("objective", kind, **values)
        beside = {"documents": documents, "stored": {"reference": reference}}
        loss, measured = ObjectiveLoss(section)(logs, labels, beside)
        assert float(loss) == pytest.approx(float(expected), rel=1e-5), (kind, values)
        assert measured[0, -2:].tolist() == pytest.approx([float(chosen), float(rejected)])
        assert measured[1].tolist() == [0.0] * measured.shape[1]


@pytest.mark.parametrize("kind", ["dpo", "simpo", "orpo"])
def test_an_answer_that_is_certain_has_a_gradient(kind):
    logs = torch.zeros(3, 4, requires_grad=True)
    labels = torch.tensor([[1, 1, 1, 1]] * 2 + [[IGNORED_LABEL] * 4])  # and one that is no pair
    documents = torch.tensor([[0, 0, 1, 1]] * 3)
    certain = logs + torch.tensor([[0.0, 0.0, -3.0, -3.0], [-3.0, -3.0, 0.0, 0.0], [0.0] * 4])
    loss, _ = ObjectiveLoss(new_section("objective", kind))(
        certain, labels, {"documents": documents}
    )
    loss.backward()
    assert loss.isfinite() and logs.grad.isfinite().all()
    assert (logs.grad[2] == 0).all() and (logs.grad[:2, 0] < 0).all()


@pytest.mark.slow
def test_every_layout_has_one_curve_and_a_run_goes_on_bit_for_bit(pairs, tmp_path):
    """Reference log-probabilities are computed on each layout, and read by a resume on another."""
    layouts = {
        "alone": (1, {"zero_stage__stage": 0}),
        "zero 1": (2, {"zero_stage__stage": 1}),
        "zero 2": (2, {"zero_stage__stage": 2}),
        "zero 3": (2, {"zero_stage__stage": 3}),
        "tensor": (2, {"zero_stage__stage": 1, "parallelism__tensor": 2}),
        "adapter alone": (1, {"zero_stage__stage": 0, **ADAPTER}),
        "adapter, zero 3": (2, {"zero_stage__stage": 3, **ADAPTER}),
    }
    plans = {
        name: tiny_plan(preferring(pairs, **changes), processes)
        for name, (processes, changes) in layouts.items()
    }
    runs = {name: RunPaths(tmp_path / name) for name in layouts}
    resumed = RunPaths(tmp_path / "resumed")
    for size in (1, 2):
        here = [name for name, (processes, _) in layouts.items() if processes == size]
        cases = [Case(plans[name], runs[name]) for name in here]
        cases += [Case(with_stop(plans["zero 3"], 3), resumed)] if size == 2 else []
        train_cases(size, cases, together=True)
    first = records(runs["alone"], "step")[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["objective"]["margin"] == pytest.approx(0, abs=1e-5)
    (computed,) = records(runs["alone"], "reference")
    assert computed["train"] + computed["held_out"] == PAIRS
    last = records(runs["alone"], "step")[-1]
    assert last["loss"] < 0.6 and last["objective"]["accuracy"] > 0.5
    for name in layouts:
        alone = runs["adapter alone" if name.startswith("adapter") else "alone"]
        for kind in ("step", "evaluation"):
            for one, other in zip(records(runs[name], kind), records(alone, kind), strict=True):
                assert one["loss"] == pytest.approx(other["loss"], abs=1e-5), (name, kind)
                for measure, value in other["objective"].items():
                    found = one["objective"][measure]
                    assert found == pytest.approx(value, rel=1e-5, abs=2e-5), (name, measure)
        for step, (_, norm) in curve(alone).items():
            assert curve(runs[name])[step][1] == pytest.approx(norm, rel=1e-4), (name, step)
    kept = resumed.reference.read_bytes()
    train_cases(2, [Case(plans["zero 3"], resumed, 2)])
    assert curve(resumed) == curve(runs["zero 3"])
    assert resumed.reference.read_bytes() == kept
    resumed.reference.unlink()
    with pytest.raises(Exception, match=r"reference\.npz is not there any more"):
        train_cases(1, [Case(plans["alone"], resumed, 3)])


@pytest.mark.slow
def test_the_curve_matches_trl(pairs, tmp_path):
    steps, rate = 20, 1e-3
    short = tmp_path / "pairs.jsonl"
    short.write_text("".join(pairs.read_text().splitlines(keepends=True)[:40]))
    config = preferring(
        short,
        steps=steps,
        gradient_accumulation_steps=1,
        evaluation_samples=0,
        evaluate_every_steps=None,
        optimizer__lr=rate,
        optimizer__weight_decay=0.0,
        schedule__kind="constant",
        data__shuffle=False,
        data__held_out_fraction=0.0,
        model__initial_weights=str(tmp_path / "model"),
        zero_stage__stage=0,
    )
    torch.manual_seed(1)
    model = skeleton(config.model, torch.float32)
    type(model)(model.config).save_pretrained(tmp_path / "model")
    run = trained(tmp_path / "run", config)
    options = {"beta": 0.1, "precompute_ref_log_probs": True}
    theirs = train_with_trl("dpo", tmp_path / "model", short, steps=steps, rate=rate, **options)
    ours = records(run, "step")
    compare_steps(ours, theirs, first_within=1e-5)
    for number, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        margin = our["objective"]["margin"]
        assert margin == pytest.approx(their["rewards/margins"], abs=1e-3), number
