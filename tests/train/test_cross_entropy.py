"""The loss without all logits: the same value and gradients, and at most a chunk of them."""

import copy

import pytest
import torch
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases
from test_recompute import FAMILIES, built
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainctl.config.schema import CrossEntropyKind, KernelsConfig
from trainctl.engines.micro_batch import IGNORED_LABEL
from trainctl.runs.layout import RunPaths
from trainctl.train.objectives.loss import (
    LanguageModel,
    chunked_cross_entropy,
    summed_cross_entropy,
)

VOCABULARY, WIDTH, TOKENS = 257, 16, 2 * 24


class LargestLogits(TorchDispatchMode):
    """The most elements of a tensor that is as wide as the vocabulary."""

    def __init__(self, width):
        super().__init__()
        self.elements = 0
        self._width = width

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and output.shape[-1:] == (self._width,):
            self.elements = max(self.elements, output.numel())
        return output


def hidden_and_labels():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 24, WIDTH, generator=generator, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (2, 24), generator=generator)
    labels[0, 5:14] = IGNORED_LABEL
    return hidden, labels


@pytest.mark.parametrize("chunk_tokens", [1, 7, 24, 48, 1000])
def test_chunks_give_the_loss_and_gradients_of_the_whole(chunk_tokens):
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY)
    hidden, labels = hidden_and_labels()
    plain = summed_cross_entropy(head(hidden), labels)
    wanted = torch.autograd.grad(plain, [hidden, head.weight, head.bias])
    with LargestLogits(VOCABULARY) as largest:
        loss = chunked_cross_entropy(
            head, hidden, labels, chunk_tokens=chunk_tokens, loss=summed_cross_entropy
        )
        gradients = torch.autograd.grad(loss, [hidden, head.weight, head.bias])
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    for gradient, expected in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
    # The transposed weight has WIDTH rows.
    assert largest.elements == max(WIDTH, min(chunk_tokens, TOKENS)) * VOCABULARY


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_gives_the_same_loss_either_way(family):
    plain = LanguageModel(built(family), None, KernelsConfig())
    kernels = KernelsConfig(cross_entropy=CrossEntropyKind.chunked, chunk_tokens=10)
    chunked = LanguageModel(copy.deepcopy(plain.model), None, kernels)
    ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    losses = []
    for model in (plain, chunked):
        losses.append(model({"input_ids": ids}, ids.roll(-1, dims=1)))
        losses[-1].backward()
        assert model({"input_ids": ids}).shape == (2, 24, 64)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    gradients = dict(chunked.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_curves_agree_where_the_head_is_partitioned(tmp_path):
    """ZeRO-3 gathers the head again for each chunk; tied, it is the embedding too."""
    cases = []
    for tied in (True, False):
        for stage, kind in [(0, CrossEntropyKind.plain), (3, CrossEntropyKind.chunked)]:
            config = tiny_config(steps=6)
            config.model.tie_word_embeddings = tied
            config.zero_stage.stage = stage
            config.kernels.cross_entropy = kind
            config.kernels.chunk_tokens = 100
            config.checkpoint.at_end = False
            run = RunPaths(tmp_path / f"{tied}-{kind.value}")
            cases.append(Case(tiny_plan(config, 2), run))
    train_cases(2, cases, together=True)
    tied, tied_chunked, plain, chunked = (curve(case.run) for case in cases)
    assert list(plain) == list(tied) == list(range(1, 7))
    for whole, in_chunks in ((tied, tied_chunked), (plain, chunked)):
        for step, values in whole.items():
            assert in_chunks[step] == pytest.approx(values, rel=1e-5), step
    assert plain != tied
