"""Samples of records: their documents, the positions with a label, and their targets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_processes import tiny_config, tiny_plan
from typer.testing import CliRunner

from trainctl.cli.main import app
from trainctl.data.corpora import load_corpora
from trainctl.data.prepare import prepare
from trainctl.engines.micro_batch import IGNORED_LABEL, MicroBatch
from trainctl.errors import TrainctlError
from trainctl.options.data import SampleKind
from trainctl.plans.mixture import SINGLE_SOURCE
from trainctl.runs.layout import RunPaths
from trainctl.train.data import PackedDataset, TrainingData

LENGTH, END = 64, 256


def samples(tmp_path: Path, kind: str, rows: list[dict], **keys) -> tuple[PackedDataset, list[int]]:
    """Return the dataset of records, and the number of each sample's record."""
    file = tmp_path / f"{kind}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny_config(
        steps=2,
        sequence_length=LENGTH,
        data__kind=kind,
        data__paths=[str(file)],
        data__held_out_fraction=0.0,
        data__mask_documents=True,
        data__on_too_long=keys.pop("on_too_long", "drop"),
        data__packing="best_fit",
        data__max_bytes=None,
        data__shuffle=False,
        evaluation_samples=0,
        evaluate_every_steps=None,
        **{f"data__{name}": value for name, value in keys.items()},
    )
    # The objectives of other kinds have tests of their own: here is what they are given.
    texts = replace(config, data=tiny_config(steps=2).data)
    plan, run = replace(tiny_plan(texts, 1), config=config), RunPaths(tmp_path)
    run.corpus.unlink(missing_ok=True)
    prepare(plan, run)
    corpora = load_corpora(run.corpus, plan.config.data)
    data = TrainingData.of(plan, corpora, data_rank=0, data_size=1)
    ((_, dataset),) = data.datasets.items()
    origin = corpora[SINGLE_SOURCE].origin(corpora[SINGLE_SOURCE].train)
    return dataset, [line - 1 for line in origin["line"].tolist()]


def documents(batch: MicroBatch, row: int, count: int) -> list[str]:
    """Return the texts of the first documents of a row, with | for the end of a document."""
    ids, numbers = batch.input_ids[row], batch.document_ids[row]
    return [
        "".join("|" if i == END else chr(i) for i in ids[numbers == n].tolist())
        for n in range(count)
    ]


def labelled_places(batch: MicroBatch, row: int) -> list[int]:
    return torch.nonzero(batch.labels[row] != IGNORED_LABEL).flatten().tolist()


def test_an_answer_stands_beside_the_answer_of_the_record_before(tmp_path):
    rows = [{"prompt": f"{n}?", "completion": "yes" * n, "label": n % 2 > 0} for n in range(1, 6)]
    rows.insert(2, {"prompt": "x" * 40, "completion": "long", "label": True})
    dataset, _ = samples(tmp_path, "answers", rows)
    left = [n for n in range(6) if n != 2]
    assert dataset.num_samples == len(left)
    batch = dataset.micro_batch(np.arange(-1, len(left)))
    assert [bool(labelled_places(batch, row)) for row in range(len(left) + 1)] == [False] + [
        True
    ] * len(left)
    assert batch.targets[1:, 0].tolist() == [float(rows[n]["label"]) for n in left]
    for row, n in enumerate(left, 1):
        own, before = rows[n], rows[n - 1]["completion"]
        expected = [f"{own['prompt']}{each}|" for each in (own["completion"], before)]
        assert documents(batch, row, 2) == expected
        learnt = batch.labels[row][batch.labels[row] != IGNORED_LABEL].tolist()
        assert learnt == [*own["completion"].encode(), END, *before.encode(), END]
        first = batch.position_ids[row][batch.document_ids[row] == 1]
        assert first.tolist() == list(range(len(expected[1])))
    with pytest.raises(TrainctlError, match="1 records are longer than a sample with the answer"):
        samples(tmp_path, "answers", rows, on_too_long="error")


def test_labelled_texts_have_their_class_and_a_label_at_each_token(tmp_path):
    rows = [{"a": "good film", "b": "yes", "c": "pos"}, {"a": "so", "b": "no", "c": "neg"}]
    dataset, places = samples(tmp_path, "labelled", rows, text_key="a", pair_key="b", label_key="c")
    batch = dataset.micro_batch(np.array([0, 1, -1]))
    assert batch.targets[:2, 0].tolist() == [[0.0, 1.0][rows[n]["c"] == "pos"] for n in places]
    for row, n in enumerate(places):
        text = f"{rows[n]['a']}|{rows[n]['b']}|"
        assert documents(batch, row, 1) == [text]
        assert labelled_places(batch, row) == list(range(len(text)))
    assert not labelled_places(batch, 2)


def test_several_labels_and_numbers_are_padded(tmp_path):
    rows = [{"text": "a", "label": ["x", "z"]}, {"text": "b", "label": []}]
    rows.append({"text": "c", "label": ["y"]})
    dataset, places = samples(tmp_path, "labelled", rows, classes=["z", "y", "x"])
    found = dataset.micro_batch(np.arange(3)).targets
    expected = np.array([[2, 0], [np.nan, np.nan], [1, np.nan]], np.float32)[places]
    assert np.array_equal(found.numpy(), expected, equal_nan=True)


def test_steps_have_a_label_at_the_last_token_of_each(tmp_path):
    rows = [{"prompt": "1+1+1", "completions": ["2", "3!"], "labels": [1, 0.5]}]
    dataset, _ = samples(tmp_path, "steps", rows * 2, step_separator=";")
    batch = dataset.micro_batch(np.array([0]))
    assert documents(batch, 0, 1) == ["1+1+12;3!;"]
    assert labelled_places(batch, 0) == [6, 9]
    assert batch.targets.tolist() == [[1.0, 0.5]]


def test_similar_texts_are_documents_of_their_own_even_of_one_token(tmp_path):
    rows = [
        {"query": "cat", "positive": "tom", "negatives": ["dog", "d"]},
        {"query": "a", "positive": "b"},
    ]
    dataset, places = samples(tmp_path, "similar", rows)
    batch = dataset.micro_batch(np.arange(2))
    texts = [["cat|", "tom|", "dog|", "d|"], ["a|", "b|"]]
    for row, n in enumerate(places):
        assert documents(batch, row, len(texts[n])) == texts[n]
        assert labelled_places(batch, row) == list(range(sum(map(len, texts[n]))))
        behind = batch.document_ids[row][sum(map(len, texts[n])) :]
        assert (behind == len(texts[n])).all()
    assert batch.targets is None


def test_bad_records_are_errors_with_their_line_or_left_out(tmp_path):
    rows = [{"text": "a", "label": 1}, {"text": "b"}, {"text": "c", "label": 0}]
    with pytest.raises(TrainctlError, match=r"labelled\.jsonl:2.*no label in 'label'"):
        samples(tmp_path, "labelled", rows)
    dataset, places = samples(tmp_path, "labelled", rows, on_bad_text="skip")
    assert sorted(places) == [0, 2] and dataset.num_samples == 2


@pytest.mark.parametrize("kind", [kind for kind in SampleKind if kind is not SampleKind.text])
def test_every_kind_of_samples_has_a_source(kind):
    from trainctl.config.registry import load_specs

    if kind is not SampleKind.prompts:
        assert [each.name for each in load_specs("data") if each.gives is kind]


def test_data_show_prints_the_targets(tmp_path):
    file = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n}", "chosen": "a", "rejected": "b", "margin": 1.5} for n in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"data.paths=[{file}]", "objective=simpo", "data=preferences", "--samples", "0"]
    shown = CliRunner().invoke(app, ["data", "show", "tiny", "training.steps=1", *words])
    assert "  targets: 1.5\n" in shown.output, (shown.output, shown.exception)
