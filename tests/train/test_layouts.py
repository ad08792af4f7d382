"""Tensor, pipeline, sequence and context parallelism give the curve of one process.

The plain products with ZeRO, offload and activation checkpointing are in the parity table; here is
what is particular to a layout.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases
from torch import nn
from transformers import LlamaForCausalLM

from trainctl.config.registry import new_section
from trainctl.config.schema import PipelinePartition
from trainctl.engines.deepspeed.pipeline import tied_weight_group
from trainctl.engines.process import Axis
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.models.model import skeleton, transformers_config, whole_pieces
from trainctl.train.optimizers import parameter_groups
from trainctl.train.parallel.pipeline import tied_weight

STEPS = 4


def clipped(family="llama", stage=1, **changes):
    changes = {"model__num_layers": 3, **changes}
    if family == "gpt2":
        changes = {"model__num_key_value_heads": None, **changes}
    return tiny_config(
        steps=STEPS,
        evaluate_every_steps=STEPS,
        sample_tokens=8,
        precision__compute="fp32",
        model__family=family,
        optimizer__gradient_clipping=0.5,  # always active
        zero_stage__stage=stage,
        **changes,
    )


def at_the_end(run):
    """Held-out loss and the sampled text."""
    events = {event["event"]: event for event in read_events(run.events)}
    return events["evaluation"]["loss"], events["sample"]["text"]


CASES = {
    "gpt2, shards of fused matrices, norms along the sequence": (
        {"family": "gpt2", "stage": 3},
        {"parallelism__tensor": 2, "parallelism__sequence_sharded_norms": True},
        2,
    ),
    "qwen3, norms of heads": (
        {"family": "qwen3", "stage": 2, "model__tie_word_embeddings": False},
        {"parallelism__tensor": 2, "parallelism__sequence_sharded_norms": True},
        2,
    ),
    "mistral, a window, documents masked, uneven stages": (
        {
            "family": "mistral",
            "model__sliding_window": 48,
            "data__mask_documents": True,
            "model__tie_word_embeddings": False,
        },
        {"parallelism__pipeline": 2, "parallelism__stage_blocks": [1, 2]},
        2,
    ),
    "gpt2, learned positions in the first of three stages, tied ends": (
        {"family": "gpt2", "stage": 0},
        {"parallelism__pipeline": 3, "parallelism__pipeline_partition": PipelinePartition.time},
        3,
    ),
    "llama, two stages on each of three ranks, uneven": (
        {"model__num_layers": 8, "gradient_accumulation_steps": 8},
        {
            "parallelism__pipeline": 3,
            "parallelism__pipeline_schedule": "dualpipev",
            "parallelism__stage_blocks": [1, 2, 1, 1, 1, 2],
        },
        3,
    ),
    "llama, tensor and sequence ranks": (
        {"stage": 3},
        {"parallelism__tensor": 2, "parallelism__sequence": 2},
        4,
    ),
    "llama, documents masked, tensor shards, a vocabulary that they do not divide": (
        {"stage": 1, "data__mask_documents": True, "model__vocab_size": 261},
        {"parallelism__tensor": 2},
        2,
    ),
    "gpt2, sequence and data ranks": ({"family": "gpt2"}, {"parallelism__sequence": 2}, 4),
    "gpt2, context and data ranks": ({"family": "gpt2"}, {"parallelism__context": 2}, 4),
    "llama, documents masked, sequence ranks": (
        {"data__mask_documents": True},
        {"parallelism__sequence": 2},
        2,
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of each case, by name: on one process, and on the case's layout."""
    folder = tmp_path_factory.mktemp("layouts")
    found = {
        name: (RunPaths(folder / f"{number}-alone"), RunPaths(folder / f"{number}"))
        for number, name in enumerate(CASES)
    }
    by_size = {}
    for name, (common, layout, processes) in CASES.items():
        configs = {1: clipped(**{**common, "stage": 0}), processes: clipped(**common, **layout)}
        for run, (size, config) in zip(found[name], configs.items(), strict=True):
            by_size.setdefault(size, []).append(Case(tiny_plan(config, size), run))
    for size, cases in by_size.items():
        train_cases(size, cases, together=True)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_curve_matches_one_process(name, runs):
    alone, run = runs[name]
    expected, found = curve(alone), curve(run)
    assert list(found) == list(expected) == list(range(1, STEPS + 1))
    for step, (loss, norm) in expected.items():
        assert norm > 0.5
        assert found[step][0] == pytest.approx(loss, rel=1e-6), step
        assert found[step][1] == pytest.approx(norm, rel=5e-6), step
    (loss, text), (expected_loss, expected_text) = at_the_end(run), at_the_end(alone)
    assert loss == pytest.approx(expected_loss, abs=2e-6)
    assert text == expected_text


def test_every_stage_makes_a_group_when_the_ends_share_a_weight(monkeypatch):
    """NCCL splits a group off that of all ranks: it hangs as soon as one of them does not."""
    made = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **_: made.append(ranks) or ranks)
    config = clipped(parallelism__pipeline=4)
    model, ranks = skeleton(config.model, torch.float32), (0, 2, 4, 6)
    weights = []
    for index in range(len(ranks)):
        axis = Axis(index, ranks, None)
        is_in_group = tied_weight_group(axis, None) is not None
        assert is_in_group == (tied_weight(model, axis) is not None)
        weights.append(is_in_group)
    assert weights == [True, False, False, True]
    assert made == [[0, 6], [2, 4], [2, 4], [0, 6]]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_embeddings_have_no_decay_whether_the_embedding_module_is_there_or_not(family):
    config = clipped(family=family)
    model = skeleton(config.model, torch.float32)
    pieces = whole_pieces(model)
    names = {piece.name for piece in pieces.values() if piece.is_embedding}
    expected = {"model.embed_tokens.weight"}
    if family == "gpt2":
        expected = {"transformer.wte.weight", "transformer.wpe.weight"}
    assert names == expected
    head = {p: piece for p, piece in pieces.items() if p is model.lm_head.weight}
    (group,) = parameter_groups(head, config)
    assert group["weight_decay"] == 0.0
    untied = {nn.Parameter(): replace(piece, is_embedding=False) for piece in head.values()}
    (group,) = parameter_groups(untied, config)
    assert group["weight_decay"] == config.optimizer.weight_decay


class OtherNames(LlamaForCausalLM):
    """A user's own model, whose output projection has another name."""

    def __init__(self, config):
        super().__init__(config)
        self.unembedding = self.lm_head
        del self.lm_head

    def get_output_embeddings(self):
        return self.unembedding


def test_muon_leaves_the_output_projection_to_adamw_whatever_its_name():
    config = clipped(model__tie_word_embeddings=False)
    config.optimizer = new_section("optimizer", "muon")
    model = OtherNames(transformers_config(config.model))
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups(whole_pieces(model), config)
    muon, decayed, _ = ({names[p] for p in group["params"]} for group in groups)
    assert muon and all(".layers." in name for name in muon)
    assert decayed == {"unembedding.weight"}
