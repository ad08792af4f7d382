"""Ring attention gives what attention to the whole sequence gives, within the budgeted memory."""

import pytest
import torch
from rank_processes import server, tiny_config, tiny_plan
from ring_probe import CHUNK, HEADS, KEY_HEADS, SAMPLES, WIDTH

from trainctl.engines.deepspeed.sequence_attention import document_starts
from trainctl.engines.micro_batch import MicroBatch, SequencePart
from trainctl.engines.ring_attention import rectangles_of
from trainctl.memory.activations import ring_bytes


@pytest.mark.parametrize(("ranks", "is_masked"), [(1, True), (2, False), (3, True), (4, True)])
def test_attention_and_gradients_are_those_of_the_whole_sequence(ranks, is_masked):
    found = server().run("ring_probe:compare", is_masked, ranks, 60.0)
    assert max(difference for difference, _ in found) < 1e-5
    if ranks == 1:
        return
    tokens = 2 * CHUNK * ranks
    config = tiny_config(
        steps=1,
        sequence_length=tokens,
        global_batch_size=2 * SAMPLES,
        model__hidden_size=HEADS * WIDTH,
        model__num_attention_heads=HEADS,
        model__num_key_value_heads=KEY_HEADS,
        parallelism__context=ranks,
    )
    plan = tiny_plan(config, ranks)
    # What the kernel gives for a block is in the gradients that the budget has anyway.
    of_kernel = SAMPLES * 2 * CHUNK * (HEADS + 2 * KEY_HEADS) * WIDTH * 4
    budget = ring_bytes(plan, 4)
    for _, peak in found:
        assert 0.75 * budget < peak < 1.05 * (budget + of_kernel)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_have_the_same_work(ranks):
    length = 2 * 4 * ranks
    work = {
        sum(
            (each.queries[2].stop - each.queries[2].start)
            * (each.keys[2].stop - each.keys[2].start)
            / (2 if each.is_causal else 1)
            for turn in rectangles_of(rank, ranks, length)
            for each in turn
        )
        for rank in range(ranks)
    }
    assert work == {length * length / 2 / ranks}


def test_parts_are_all_of_a_sequence():
    tokens = torch.arange(24).unsqueeze(0)
    parts = [SequencePart(s, 2, c, 3).of(tokens)[0].tolist() for c in range(3) for s in range(2)]
    assert parts[:2] == [[0, 1, 2, 3], [20, 21, 22, 23]]
    assert sorted(token for part in parts for token in part) == list(range(24))


def test_padding_is_one_document_and_texts_stay_apart():
    batch = MicroBatch(
        input_ids=torch.zeros(1, 8, dtype=torch.long),
        position_ids=torch.tensor([[0, 1, 0, 0, 1, 0, 0, 0]]),
        labels=torch.tensor([[5, -100, 7, 5, -100, -100, -100, -100]]),
        document_ids=torch.zeros(1, 8, dtype=torch.long),
        sample_ids=torch.zeros(1, dtype=torch.long),
    )
    assert document_starts(batch).tolist() == [[True, False, True, True, False, True, False, False]]
