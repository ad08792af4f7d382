"""Every way to compute the loss, with a z-loss and labels that do not count, against the plain one.

Liger's kernel needs a GPU: here stands what it computes, by its source (liger-kernel 0.8.2,
ops/fused_linear_cross_entropy.py) and by a run of it in Triton's interpreter.
"""

import copy
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from test_recompute import built

from trainctl.config.schema import CrossEntropyKind, KernelsConfig
from trainctl.engines.micro_batch import IGNORED_LABEL
from trainctl.train.objectives.loss import LanguageModel

Z_LOSS = 0.02


@dataclass
class CrossEntropyOutput:
    """Liger's, which cannot be unpacked."""

    loss: torch.Tensor
    z_loss: torch.Tensor


def stand_in(input, weight, target, *, bias, ignore_index, lse_square_scale, reduction, **returns):
    """Compute what the fused kernel returns: the loss includes the z-loss, which alone has no
    gradient.
    """
    assert reduction == "sum"
    logits = torch.nn.functional.linear(input, weight, bias)
    counted = target != ignore_index
    z_loss = lse_square_scale * logits.logsumexp(dim=-1)[counted].square().sum()
    cross_entropy = torch.nn.functional.cross_entropy(
        logits, target, ignore_index=ignore_index, reduction="sum"
    )
    if not returns["return_z_loss"]:
        return cross_entropy + z_loss
    return CrossEntropyOutput(cross_entropy + z_loss, z_loss.detach())


@pytest.fixture
def liger(monkeypatch):
    module = ModuleType("liger_kernel.transformers.functional")
    module.liger_fused_linear_cross_entropy = stand_in
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("z_loss", [0.0, Z_LOSS])
@pytest.mark.parametrize("kind", [CrossEntropyKind.chunked, CrossEntropyKind.liger_fused])
def test_the_loss_and_its_gradients_are_the_plain_ones(kind, z_loss, liger):
    plain = LanguageModel(built(), None, KernelsConfig(), z_loss)
    kernels = KernelsConfig(cross_entropy=kind, chunk_tokens=10)
    other = LanguageModel(copy.deepcopy(plain.model), None, kernels, z_loss)
    ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, dims=1)
    labels[0, 3:9] = IGNORED_LABEL
    found = []
    for model in (plain, other):
        loss = model.train()({"input_ids": ids}, labels)
        loss.backward()
        found.append((loss, model.last_z_loss))
        model.eval()
        with torch.no_grad():
            score = model({"input_ids": ids}, labels)
        assert score.shape == () and model.last_z_loss is None
        of_training = 0.0 if z_loss == 0 else found[-1][1]
        torch.testing.assert_close(score, loss.detach() - of_training)
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)
    assert (found[0][1] is None) == (z_loss == 0)
    gradients = dict(other.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad, rtol=1e-4, atol=1e-5)
