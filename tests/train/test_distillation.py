"""Distillation: the stored teacher, the divergence on k + 1 outcomes, one curve everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rank_processes import Case, curve, server, tiny_config, tiny_plan, train_cases, with_stop
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.registry import new_section
from trainctl.config.schema import RunConfig
from trainctl.data.corpora import load_corpora
from trainctl.data.prepare import prepare
from trainctl.data.teacher_store import TeacherStore, check_teacher, row_type, stored_teachers
from trainctl.data.tokenizer import ByteTokenizer, FileTokenizer
from trainctl.engines.micro_batch import IGNORED_LABEL
from trainctl.errors import TrainctlError
from trainctl.memory.budget import budget
from trainctl.options.objective.distill import DivergenceKind, row_bytes
from trainctl.runs.files import write_json
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.data import TrainingData
from trainctl.train.models import frozen_base
from trainctl.train.models.model import skeleton
from trainctl.train.objectives import distillation
from trainctl.train.objectives.base import ObjectiveLoss
from trainctl.train.objectives.distillation import outcome_log_probabilities
from trainctl.tuning.input_files import missing_files

VOCABULARY, LENGTH = 37, 12


def identity(**changes):
    return {
        "teacher": "a",
        "samples": 150,
        "length": LENGTH,
        "vocab_size": VOCABULARY,
        "top_k": 4,
        "values": "fp32",
        **changes,
    }


def fill(store: TeacherStore, shares: list[int], logits: torch.Tensor) -> None:
    """Write shares in which sample i has labels at the first i % LENGTH positions."""
    store.begin()
    for share in shares:
        found = []
        for sample in store.samples(share):
            rows = store.rows(sample % LENGTH)
            rows["place"] = np.arange(len(rows))
            top = logits[sample, : len(rows)].log_softmax(-1).topk(4)
            rows["ids"], rows["log_probabilities"] = top.indices, top.values
            rows["tail"] = torch.log1p(-top.values.exp().sum(-1))
            found.append(rows)
        store.write(share, found)


def test_a_store_is_filled_in_shares_and_read_by_sample(tmp_path):
    logits = torch.randn(150, LENGTH, VOCABULARY)
    store = TeacherStore(tmp_path, identity())
    shares = store.missing()
    assert len(shares) == 50 and list(store.samples(49)) == [147, 148, 149]
    fill(store, shares[::2], logits)
    (store.folder / "000004.bin").write_bytes(b"cut")
    again = TeacherStore(tmp_path, identity())
    assert again.missing() == sorted([4, *shares[1::2]])
    fill(again, again.missing(), logits)
    found = again[np.array([149, 3, 0])]
    assert found.shape == (3, LENGTH, 9) and found.dtype == np.int32
    values = found[..., 4:].view(np.float32)
    expected = logits[149, :5].log_softmax(-1).topk(4)
    assert found[0, :5, :4].tolist() == expected.indices.tolist()
    np.testing.assert_array_equal(values[0, :5, :4], expected.values.numpy())
    np.testing.assert_allclose(np.exp(values[:2, :3]).sum(-1), 1, rtol=1e-6)
    assert found[2].tolist() == [[0, 1, 2, 3, 0, 0, 0, 0, 0]] * LENGTH  # no label
    for other in ({"teacher": "b"}, {"samples": 151}, {"teacher": None}, {"top_k": 3}):
        assert len(TeacherStore(tmp_path, identity(**other)).missing()) in (50, 51)
    TeacherStore(tmp_path, identity(teacher="b")).begin()
    unnamed = {name: value for name, value in identity().items() if name != "teacher"}
    assert stored_teachers(tmp_path, unnamed) == {"a": store.folder}  # b's is not whole
    assert stored_teachers(tmp_path, unnamed | {"top_k": 3}) == {}


@pytest.mark.parametrize(
    ("train", "held_out", "found"),
    [("ab", "b", "b"), ("a", "b", None), ("", "", None), ("ab", "ab", "from 2 teachers: a ")],
)
def test_all_samples_have_one_teacher(train, held_out, found, monkeypatch):
    stores = {"train": train, "held_out": held_out}
    monkeypatch.setattr(distillation, "_identity", lambda plan, side: side)
    monkeypatch.setattr(
        distillation,
        "stored_teachers",
        lambda base, side: {each: base / f"teacher-{each}" for each in stores[side]},
    )
    plan = tiny_plan(distilling(None), 1)
    if found and len(found) > 1:
        with pytest.raises(TrainctlError, match=found):
            distillation._only_teacher(plan, list(stores))
    else:
        assert distillation._only_teacher(plan, list(stores)) == found


def test_a_teacher_may_have_fewer_rows_than_tokens_are_stored():
    section = new_section("objective", "distill", top_k=8)
    rows = np.empty(3, row_type(264, 8, "fp32"))
    distillation._fill_rows(rows, torch.randn(3, 5), section)
    assert all(sorted(each[:5]) == [0, 1, 2, 3, 4] for each in rows["ids"].tolist())
    assert all(sorted(each[5:]) == [5, 6, 7] for each in rows["ids"].tolist())
    np.testing.assert_allclose(np.exp(rows["log_probabilities"]).sum(-1), 1, rtol=1e-6)
    assert (rows["log_probabilities"][:, 5:] == -np.inf).all() and (rows["tail"] == -np.inf).all()


@pytest.mark.parametrize("name", ["mkdir", "write"])
def test_a_teacher_is_named_where_nothing_can_be_written(name, teacher, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    if name == "mkdir":
        monkeypatch.setattr(Path, "mkdir", refuse)
    else:
        monkeypatch.setattr(frozen_base, "write_json", refuse)
    process = SimpleNamespace(rank=0, world_size=1, is_first=True, gather=lambda each: [each])
    found = distillation._Teacher(str(teacher), process).digest(tmp_path / name)
    monkeypatch.undo()
    assert found == distillation._Teacher(str(teacher), process).digest(tmp_path / "kept")


def stored_rows(logits: torch.Tensor, k: int, temperature: float = 1.0) -> torch.Tensor:
    logs = (logits / temperature).log_softmax(-1)
    top = logs.topk(k)
    rest = logs.scatter(-1, top.indices, -torch.inf).logsumexp(-1, keepdim=True)
    values = torch.cat([top.values, rest], -1)
    return torch.cat([top.indices.int(), values.view(torch.int32)], -1)


def loss_of(kind, teacher, student, labels, k, **keys):
    section = new_section("objective", "distill", divergence=DivergenceKind(kind), top_k=k, **keys)
    stored = {"teacher": stored_rows(teacher, k, keys.get("temperature", 1.0))}
    beside = {"documents": torch.zeros_like(labels), "stored": stored}
    return ObjectiveLoss(section)(student, labels, beside)


def plain(kind, teacher, student, beta=0.5, temperature=1.0):
    p, q = ((each / temperature).log_softmax(-1) for each in (teacher, student))
    if kind == "forward_kl":
        return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    if kind == "reverse_kl":
        return F.kl_div(p, q, reduction="none", log_target=True).sum(-1)
    m = torch.log(beta * p.exp() + (1 - beta) * q.exp())
    own = [F.kl_div(m, each, reduction="none", log_target=True).sum(-1) for each in (p, q)]
    return beta * own[0] + (1 - beta) * own[1]


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_the_whole_vocabulary_gives_the_plain_divergence(kind, monkeypatch):
    monkeypatch.setattr("trainctl.train.objectives.distillation.CHUNK_POSITIONS", 7)
    torch.manual_seed(1)
    teacher, student = 2 * torch.randn(3, LENGTH, VOCABULARY), torch.randn(3, LENGTH, VOCABULARY)
    labels = torch.randint(VOCABULARY, (3, LENGTH))
    labels[0, :4] = IGNORED_LABEL
    counted = labels != IGNORED_LABEL
    keys = {"temperature": 1.7, "beta": 0.3}
    one, other = (student.clone().requires_grad_() for _ in range(2))
    loss, measures = loss_of(kind, teacher, one, labels, VOCABULARY, **keys, label_weight=0.25)
    each = plain(kind, teacher, other, **keys)
    cross_entropy = F.cross_entropy(other[counted], labels[counted], reduction="sum")
    expected = 0.75 * each[counted].sum() + 0.25 * cross_entropy
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(loss, one)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, other)[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(measures[:, 0], torch.where(counted, each, 0).sum(1).detach())
    assert (grad[0, :4] == 0).all()


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_other_tokens_are_one_outcome(kind):
    """The divergence grows with k up to the whole one; it is that of the merged distributions."""
    torch.manual_seed(2)
    teacher, student = 2 * torch.randn(1, 5, VOCABULARY), torch.randn(1, 5, VOCABULARY)
    labels = torch.zeros(1, 5, dtype=torch.long)
    found = [float(loss_of(kind, teacher, student, labels, k)[0]) for k in (1, 4, 16, VOCABULARY)]
    assert found == sorted(found) and found[0] < found[-1]
    ids = teacher.topk(4).indices
    p, q = (
        torch.cat([a.gather(-1, ids), 1 - a.gather(-1, ids).sum(-1, keepdim=True)], -1).log()
        for a in (teacher.softmax(-1), student.softmax(-1))
    )
    assert found[1] == pytest.approx(float(plain(kind, p, q).sum()), rel=1e-5)


def test_outcomes_have_the_gradient_of_their_definition():
    torch.manual_seed(3)
    logits = (30 * torch.randn(2, 3, 9)).double().requires_grad_()  # some tails vanish in fp32
    ids = logits.topk(3).indices
    kept = torch.randn(2, 3, 4)
    rest = logits.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    whole = torch.cat([logits.gather(-1, ids), rest], -1) - logits.logsumexp(-1, keepdim=True)
    (expected,) = torch.autograd.grad((whole * kept).sum(), logits)
    single = logits.detach().float().requires_grad_()
    found = outcome_log_probabilities(single, ids)
    torch.testing.assert_close(found, whole.float(), rtol=1e-4, atol=1e-4)
    (grad,) = torch.autograd.grad((found * kept).sum(), single)
    torch.testing.assert_close(grad, expected.float(), rtol=1e-4, atol=1e-4)


def test_a_teacher_of_other_tokens_is_refused(tmp_path):
    texts = ("the cat sat on the mat", "the dog sat on the log")
    folders = [tmp_path / name for name in ("student", "teacher", "bare")]
    for folder, text in zip(folders, (*texts, ""), strict=True):
        folder.mkdir()
        vocabulary = {word: number for number, word in enumerate(dict.fromkeys(text.split()))}
        if text:
            Backend(WordLevel(vocabulary, unk_token="the")).save(str(folder / "tokenizer.json"))
    student = FileTokenizer(folders[0] / "tokenizer.json")
    config = distilling(folders[0])
    check_teacher(config, student)
    for folder, problem in (
        (folders[1], "2 of 5 ids differ: 1 is 'cat' and there 'dog', 4 is 'mat' and there 'log'"),
        (folders[2], r"has no tokenizer\.json to compare"),
    ):
        with pytest.raises(TrainctlError, match=problem):
            check_teacher(distilling(folder), student)
    with pytest.raises(TrainctlError, match="one has a file and the other none"):
        check_teacher(config, ByteTokenizer())


def test_teacher_and_store_are_in_the_budget(tmp_path):
    """A teacher that is larger than the whole training decides the peak."""
    plan = tiny_plan(distilling(None), 2)
    notes = budget(plan).notes
    row = row_type(260, 64, "fp32").itemsize
    assert row == row_bytes(plan.config.objective, 260)
    assert any(f"take {row:,} bytes" in note for note in notes), notes
    shape = [1 << 20, 1 << 10]
    write_json(tmp_path / "manifest.json", {"shapes": {"weight": shape}})
    found = budget(tiny_plan(distilling(tmp_path), 2))
    assert found.peak_phase == "teacher" and found.components.parameters == 4 << 30
    missing = missing_files(distilling(None))
    assert [each.rule for each in missing if each.key == "objective.teacher"] == ["TC471"]
    (gone,) = (e for e in missing_files(distilling("org/name")) if e.key == "objective.teacher")
    assert gone.hint.startswith("hf download org/name")


def test_rows_of_a_mixture_are_those_of_their_source(tmp_path):
    plain = to_plain(tiny_config(steps=4, sequence_length=32, evaluate_every_steps=None))
    plain["data"]["sources"] = {}
    for number, name in enumerate(("one", "other")):
        (tmp_path / f"{name}.txt").write_text(chr(ord("a") + number) * 20_000)
        source = {"paths": [str(tmp_path / f"{name}.txt")], "held_out_fraction": 0.0, "weight": 1}
        plain["data"]["sources"][name] = source
    plan, run = tiny_plan(from_plain(RunConfig, plain), 1), RunPaths(tmp_path)
    prepare(plan, run)
    corpora = load_corpora(run.corpus, plan.config.data)
    data = TrainingData.of(plan, corpora, data_rank=0, data_size=1)
    for (name, _), dataset in data.datasets.items():
        letter = ord("a") if name == "one" else ord("b")
        dataset.stored["teacher"] = np.arange(dataset.num_samples) + 1000 * letter
    seen = set()
    for batch in data.step(0, plan.batch):
        letters = batch.input_ids[:, 5]
        assert batch.stored["teacher"].tolist() == (batch.sample_ids + 1000 * letters).tolist()
        seen |= set(letters.tolist())
    assert seen == {ord("a"), ord("b")}


def distilling(teacher, **changes):
    """Build a tiny configuration that learns a teacher's distributions of packed texts."""
    return tiny_config(
        **{
            "steps": 6,
            "sequence_length": 64,
            "evaluate_every_steps": 3,
            "sample_tokens": 0,
            "optimizer__lr": 3e-3,
            "schedule__warmup_fraction": 0.0,
            "objective__kind": "distill",
            "objective__teacher": teacher and str(teacher),
            "objective__store_as": "fp32",
            "data__max_bytes": 15_000,
            "data__packing": "best_fit",
            "data__mask_documents": True,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers directory of another shape than the student, with random weights."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    shape = replace(tiny_config().model, hidden_size=96, num_layers=2, initializer_range=0.2)
    torch.manual_seed(1)
    model = skeleton(shape, torch.float32)
    type(model)(model.config).save_pretrained(folder)
    return folder


def recorded(run: RunPaths, kind: str) -> list[dict]:
    return [each for each in read_events(run.events) if each["event"] == kind]


@pytest.mark.slow
def test_every_layout_has_one_curve_and_asks_the_teacher_once(teacher, tmp_path, monkeypatch):
    """Layouts compute the teacher's log-probabilities by themselves, in folders of their own.

    The tensor ranks find those of one process, of which two shares are missing as after a kill.
    """
    layouts = {
        "alone": (1, {"zero_stage__stage": 0}),
        "zero 3": (2, {"zero_stage__stage": 3}),
        "tensor": (2, {"zero_stage__stage": 1, "parallelism__tensor": 2}),
    }
    runs = {name: RunPaths(tmp_path / name) for name in [*layouts, "resumed"]}
    stores = {name: tmp_path / f"store {name}" for name in runs}
    stores["tensor"] = stores["alone"]
    plans = {
        name: tiny_plan(
            distilling(teacher, objective__teacher_log_probabilities=str(stores[name]), **changes),
            processes,
        )
        for name, (processes, changes) in layouts.items()
    }
    train_cases(1, [Case(plans["alone"], runs["alone"])])
    shares = sorted(stores["alone"].glob("teacher-*/*.bin"))
    for share in shares[3:5]:
        share.unlink()
    kept = {share: share.stat().st_mtime_ns for share in shares if share.exists()}
    here = [name for name, (processes, _) in layouts.items() if processes == 2]
    cases = [Case(plans[name], runs[name]) for name in here]
    train_cases(2, [*cases, Case(with_stop(plans["zero 3"], 3), runs["resumed"])], together=True)
    assert {share: share.stat().st_mtime_ns for share in kept} == kept
    assert sorted(stores["alone"].glob("teacher-*/*.bin")) == shares
    first, *_, last = recorded(runs["alone"], "step")
    assert last["objective"]["divergence"] < 0.95 * first["objective"]["divergence"]
    for name in layouts:
        for kind in ("step", "evaluation"):
            pairs = zip(recorded(runs[name], kind), recorded(runs["alone"], kind), strict=True)
            for one, other in pairs:
                assert one["loss"] == pytest.approx(other["loss"], abs=1e-5), (name, kind)
                for measure, value in other["objective"].items():
                    assert one["objective"][measure] == pytest.approx(value, abs=2e-5), name
        for step, (_, norm) in curve(runs["alone"]).items():
            assert curve(runs[name])[step][1] == pytest.approx(norm, rel=1e-4), (name, step)
    # A resume on another layout reads what the first attempt stored: the teacher is not there.
    away = teacher.rename(teacher.with_name("away"))
    train_cases(1, [Case(plans["alone"], runs["resumed"], 2)])
    away.rename(teacher)
    assert curve(runs["resumed"])[6][0] == pytest.approx(curve(runs["alone"])[6][0], abs=1e-5)


@pytest.mark.slow
def test_the_curve_is_that_of_a_plain_loop_with_the_loss_of_trl(teacher, tmp_path):
    keys = {
        "steps": 8,
        "gradient_accumulation_steps": 1,
        "evaluate_every_steps": None,
        "evaluation_samples": 0,
        "schedule__kind": "constant",
        "optimizer__lr": 1e-3,
        "optimizer__weight_decay": 0.0,
        "data__shuffle": False,
        "data__packing": "stream",
        "data__mask_documents": False,
        "objective__top_k": 260,
        "zero_stage__stage": 0,
        "model__initial_weights": str(tmp_path / "model"),
    }
    kinds = {"reverse_kl": 1.0, "jsd": 0.3}
    cases = [
        Case(
            tiny_plan(
                distilling(
                    teacher, objective__divergence=kind, objective__beta=beta or 0.5, **keys
                ),
                1,
            ),
            RunPaths(tmp_path / kind),
        )
        for kind, beta in kinds.items()
    ]
    torch.manual_seed(2)
    model = skeleton(cases[0].plan.config.model, torch.float32)
    type(model)(model.config).save_pretrained(tmp_path / "model")
    train_cases(1, cases, together=True)
    corpora = load_corpora(cases[0].run.corpus, cases[0].plan.config.data)
    data = TrainingData.of(cases[0].plan, corpora, data_rank=0, data_size=1)
    batch = cases[0].plan.batch
    tokens = [
        torch.cat([part.input_ids for part in data.step(8 * step, batch)]) for step in range(8)
    ]
    torch.save(torch.stack(tokens), tmp_path / "tokens.pt")
    arguments = str(tmp_path / "model"), str(teacher), tmp_path / "tokens.pt", [*kinds.values()]
    (found,) = server().run("trl_distillation:train", arguments, 1, 300.0)
    for case, theirs in zip(cases, found, strict=True):
        ours = recorded(case.run, "step")
        assert len(ours) == len(theirs) == 8
        for our, (loss, norm) in zip(ours, theirs, strict=True):
            assert our["loss"] == pytest.approx(loss, abs=1e-4), case.run
            assert our["grad_norm"] == pytest.approx(norm, rel=1e-3), case.run
