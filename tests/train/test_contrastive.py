"""Embeddings: pooling, InfoNCE over the global batch, and its two passes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from objective_cases import LAYOUTS, config_of, difference, plan_on, train_on
from rank_processes import trained
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from trainctl.config.registry import new_section
from trainctl.engines.first_pass import FirstPass
from trainctl.engines.micro_batch import IGNORED_LABEL, MicroBatch
from trainctl.engines.protocol import same_randomness
from trainctl.options.objective.contrastive import Pooling
from trainctl.runs.checkpoints import newest_checkpoint
from trainctl.runs.records import read_events
from trainctl.train.evaluation import scored_together
from trainctl.train.export.directory import export
from trainctl.train.models.model import skeleton
from trainctl.train.objectives.base import Beside, ObjectiveLoss, SeenHiddenStates
from trainctl.train.objectives.scores import pooled

DOCUMENTS = torch.tensor([[0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 2, 2]])
LABELS = torch.tensor([[1, 1, 1, 1, 1, IGNORED_LABEL], [1] * 4 + [IGNORED_LABEL] * 2])
"""A sample of three texts and padding, and one of two texts."""


def test_a_text_has_the_mean_or_an_end_of_its_own_hidden_states():
    hidden = torch.randn(2, 6, 4)
    seen = SeenHiddenStates(hidden, LABELS != IGNORED_LABEL, Beside(documents=DOCUMENTS))
    spans = ((0, 0, 2), (0, 2, 4), (0, 4, 5)), ((1, 0, 1), (1, 1, 4))
    for pooling, of in (
        (Pooling.mean, lambda states: states.mean(dim=0)),
        (Pooling.last, lambda states: states[-1]),
        (Pooling.first, lambda states: states[0]),
    ):
        found = pooled(seen, pooling)
        assert found.shape == (2, 3, 4)
        for sample, texts in enumerate(spans):
            for text, (row, begin, end) in enumerate(texts):
                torch.testing.assert_close(found[sample, text], of(hidden[row, begin:end]))
        assert (found[1, 2] == 0).all()


def _batches(lengths: list[int], texts: list[int]) -> list[MicroBatch]:
    """Return micro-batches of the lengths, whose samples have so many texts of one token."""
    batches, first = [], 0
    for length in lengths:
        ids = torch.arange(max(texts))[None].repeat(length, 1)
        own = torch.tensor(texts[first : first + length])[:, None]
        batches.append(
            MicroBatch(
                input_ids=ids,
                labels=torch.where(ids < own, 1, IGNORED_LABEL),
                position_ids=torch.zeros_like(ids),
                document_ids=ids,
                sample_ids=torch.arange(first, first + length),
                counts_records=True,
            )
        )
        first += length
    return batches


def test_an_evaluation_batch_is_as_large_as_the_global_one(tmp_path):
    plan = plan_on(LAYOUTS["ZeRO 3"], "contrastive", tmp_path, steps=4)
    batch = plan.batch
    assert scored_together(plan, data_size=2) == batch.gradient_accumulation_steps
    alone = scored_together(plan, data_size=1)  # in one process, outside training
    assert alone * batch.micro_batch_size == batch.global_batch_size


@pytest.mark.parametrize("symmetric", [False, True])
def test_micro_batches_do_not_change_loss_and_gradient(symmetric):
    """Also where some samples have no negative, so that features differ in width, or are padding:
    the last sample.
    """
    torch.manual_seed(0)
    texts, width = [3, 2, 2, 3, 2, 0], 8
    objective = ObjectiveLoss(new_section("objective", "contrastive", symmetric=symmetric))
    weight = torch.randn(6, 3, width)
    results = []
    for lengths in ([6], [3, 3], [2, 2, 2]):
        projection = torch.eye(width, requires_grad=True)
        batches = _batches(lengths, texts)

        def output(batch, projection=projection):
            hidden = weight[batch.sample_ids] @ projection
            beside = batch.objective_inputs(torch.device("cpu"))
            return objective(hidden, batch.labels, beside)[0]

        first = FirstPass.of(batches, output, objective.whole)
        for batch in first.with_gradients(batches):
            output(batch).backward()
        results.append((first.losses, first.measures, projection.grad))
    for losses, measures, gradient in results[1:]:
        torch.testing.assert_close(losses, results[0][0])
        torch.testing.assert_close(measures, results[0][1])
        torch.testing.assert_close(gradient, results[0][2])
    # By hand: candidates are the similar texts of five samples, and two negatives.
    projection = torch.eye(width, requires_grad=True)
    unit = F.normalize(weight @ projection, dim=-1)
    candidates = torch.cat([unit[:5, 1], unit[[0, 3], 2]])
    labels = torch.arange(5)
    expected = F.cross_entropy(unit[:5, 0] @ candidates.T / 0.05, labels, reduction="none")
    if symmetric:
        back = F.cross_entropy(unit[:5, 1] @ unit[:5, 0].T / 0.05, labels, reduction="none")
        expected = (expected + back) / 2
    expected.sum().backward()
    losses, _, gradient = results[0]
    torch.testing.assert_close(losses[:5], expected.detach())
    assert losses[5] == 0 and gradient.isfinite().all()
    torch.testing.assert_close(gradient, projection.grad)


def test_both_passes_draw_the_same_dropout():
    with same_randomness(torch.device("cpu")):
        first = torch.rand(4)
    assert torch.equal(torch.rand(4), first)


@pytest.mark.slow
def test_every_layout_has_one_curve(tmp_path):
    """The head, which is not tied, has no gradient."""
    found = train_on(("1", "ZeRO 2", "DP 4"), "contrastive, symmetric", tmp_path, steps=4)
    assert found["1"] is not None
    for losses in found.values():
        assert losses is not None and difference(losses, found["1"]) < 1e-5
    assert found["1"]["step"][-1] < found["1"]["step"][0]


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of ASCII characters that begins and ends a text."""
    vocabulary = {chr(number): number for number in range(256)} | {"<b>": 256, "<e>": 257}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="\0"))
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    backend.post_processor = TemplateProcessing(
        single="<b> $A <e>", special_tokens=[("<b>", 256), ("<e>", 257)]
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>").save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", [Pooling.mean, Pooling.last])
def test_the_curve_and_the_export_match_sentence_transformers(pooling, tmp_path):
    """Its loss in two passes has mini-batches too, of one rank: 8 records, 3 at a time."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss

    steps, rate, texts = 8, 1e-3, ("query", "positive", "negative")
    rows = [
        {"query": f"{a}+{7 * a % 31}", "positive": f"{8 * a % 31}", "negative": f"{a} less"}
        for a in range(64)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(
        "contrastive",
        tmp_path,
        steps=steps,
        data__paths=[str(tmp_path / "rows.jsonl")],
        data__held_out_fraction=0.0,
        data__shuffle=False,
        evaluation_samples=0,
        evaluate_every_steps=None,
        optimizer__lr=rate,
        optimizer__weight_decay=0.0,
        schedule__kind="constant",
        checkpoint__at_end=True,
        objective__pooling=pooling,
        tokenizer__kind="hf",
        tokenizer__path=str(tmp_path / "model"),
        model__initial_weights=str(tmp_path / "model"),
    )
    write_tokenizer(tmp_path / "model")
    torch.manual_seed(1)
    model = skeleton(config.model, torch.float32)
    type(model)(model.config).save_pretrained(tmp_path / "model")
    run = trained(tmp_path / "run", config)
    checkpoint, _ = newest_checkpoint(run)
    assert checkpoint is not None
    export(config, checkpoint.path, tmp_path / "exported", dtype=torch.float32)
    ours = SentenceTransformer(str(tmp_path / "exported"), device="cpu")
    shutil.copytree(tmp_path / "exported", tmp_path / "start")
    shutil.copy(tmp_path / "model" / "model.safetensors", tmp_path / "start")
    theirs = SentenceTransformer(str(tmp_path / "start"), device="cpu")
    theirs.train()
    loss_of = CachedMultipleNegativesRankingLoss(theirs, mini_batch_size=3)
    optimizer = torch.optim.AdamW(theirs.parameters(), rate, (0.9, 0.95), weight_decay=0.0)
    losses = [event["loss"] for event in read_events(run.events) if event["event"] == "step"]
    assert len(losses) == steps
    for number, found in enumerate(losses):
        batch = rows[8 * number : 8 * number + 8]
        columns = [theirs.preprocess([row[text] for row in batch]) for text in texts]
        loss = loss_of(columns, torch.zeros(8))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert found == pytest.approx(loss.item(), abs=1e-4 if number else 1e-5), number
    theirs.eval()
    sample = [row["query"] for row in rows[:9]]
    torch.testing.assert_close(
        *(torch.tensor(each.encode(sample)) for each in (ours, theirs)), atol=1e-4, rtol=0
    )
