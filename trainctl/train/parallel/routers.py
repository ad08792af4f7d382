"""Load statistics, auxiliary losses and biases of a model's routers.

The added loss is a mean over sequences, weighted by their labels as the main loss is, so it does
not depend on micro-batches or layout. (The mean over a micro-batch, as in transformers, does depend
on them: the loss is not linear in its tokens.) Router biases follow the counts of all ranks'
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from trainctl.config.schema import RunConfig
from trainctl.engines.micro_batch import IGNORED_LABEL
from trainctl.engines.process import Process, ProcessMesh
from trainctl.errors import TrainctlError
from trainctl.models.anatomy import ROUTER_BIAS
from trainctl.plans.settings import auxiliary_loss
from trainctl.train.models.recompute import is_recomputing
from trainctl.train.parallel.experts import routers_of


@dataclass(frozen=True, slots=True)
class Load:
    """Distribution of a step's tokens over the experts, on all ranks."""

    counts: list[list[int]]
    """Number of times that each expert was chosen, for each sparse layer."""
    entropy: float
    """Entropy of the router probabilities, in nats, as a mean over tokens and layers."""
    auxiliary_loss: float | None = None
    """Part of the mean loss that the auxiliary loss adds; None without one."""
    z_loss: float | None = None
    """Part of the mean loss that the routers' z loss adds; None without one."""

    def record(self) -> dict[str, Any]:
        """Return the fields of the step record. No token is ever dropped.

        `load` is the largest expert's count over the mean count, of the worst layer.
        """
        each = [max(row) * len(row) / max(1, sum(row)) for row in self.counts]
        idle = sum(count == 0 for row in self.counts for count in row)
        found = {
            "load": max(each),
            "load_by_layer": [round(load, 4) for load in each],
            "idle": idle / sum(len(row) for row in self.counts),
            "entropy": self.entropy,
            "auxiliary_loss": self.auxiliary_loss,
            "z_loss": self.z_loss,
        }
        return {name: value for name, value in found.items() if value is not None}


class Routers:
    """The routers of a model, observed by hooks while it trains.

    Raises:
        TrainctlError: The experts or the routers of the model do not support a configured loss or
            bias update.
    """

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        self._auxiliary, self._z = auxiliary_loss(config), config.experts.z_loss
        self._adds_loss = self._auxiliary > 0 or self._z > 0
        self._rate = config.experts.bias_update_rate
        self._layers = [router for router, _ in routers_of(model)]
        self._sizes = [module.num_experts for _, module in routers_of(model)]
        self._chosen: dict[int, torch.Tensor] = {}
        self._logits: dict[int, torch.Tensor] = {}
        self._counts: dict[int, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}
        model_config = config.model
        has_experts = model_config.is_directory and (model_config.num_experts or 1) > 1
        if has_experts and not self._layers and (self._adds_loss or self._rate > 0):
            raise TrainctlError(
                f"{type(model).__name__} has no experts that transformers has joined to one "
                "parameter a layer: they cannot be kept equally busy",
                hint="experts.auxiliary_loss=0, experts.z_loss=0, experts.bias_update_rate=0",
            )
        if self._rate > 0 and not all(hasattr(router, ROUTER_BIAS) for router in self._layers):
            raise TrainctlError(
                f"experts.bias_update_rate={self._rate:g}, but the routers of "
                f"{type(model).__name__} have no bias that experts are chosen by",
                hint="experts.auxiliary_loss=0.001 in its place",
            )
        for layer, (router, module) in enumerate(routers_of(model)):
            router.register_forward_hook(partial(self._see_scores, layer))
            module.register_forward_pre_hook(partial(self._see_choice, layer))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _see_scores(self, layer: int, router: nn.Module, given: Any, made: Any) -> None:
        if not router.training or is_recomputing():
            return
        logits = made[0] if isinstance(made, tuple) else made
        if self._adds_loss:
            self._logits[layer] = logits
        with torch.no_grad():
            probabilities = self._probabilities(layer, logits)
            entropy = -torch.xlogy(probabilities, probabilities).sum(-1).mean()
        self._add("entropy", entropy)
        self._add("passes", torch.ones_like(entropy))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _see_choice(self, layer: int, module: nn.Module, given: tuple[Any, ...]) -> None:
        if not module.training or is_recomputing():
            return
        index = given[1]
        if self._adds_loss:
            self._chosen[layer] = index
        counts = torch.bincount(index.flatten(), minlength=self._sizes[layer])
        self._counts[layer] = self._counts.get(layer, 0) + counts

    def _probabilities(self, layer: int, logits: torch.Tensor) -> torch.Tensor:
        """Return the expert probabilities of each token in a layer.

        Routers with a bias, as in DeepSeek-V3, use normalised sigmoids (arXiv:2412.19437,
        equation 18).
        """
        if hasattr(self._layers[layer], ROUTER_BIAS):
            scores = logits.float().sigmoid()
            return scores / scores.sum(dim=-1, keepdim=True)
        return logits.float().softmax(dim=-1)

    def added_loss(self, labels: torch.Tensor) -> torch.Tensor | None:
        """Return the term to add to a micro-batch's summed loss: a gradient with value 0.

        For each sequence, the term is the mean over the layers of E sum_e f_e P_e
        (arXiv:2101.03961, equation 4) and of the mean squared log-normaliser (arXiv:2202.08906,
        equation 5), times the number of the sequence's labels. f counts every choice of a
        token, as in transformers, so the minimum of the sum is the number of experts per token.
        """
        logits, chosen = list(self._logits.values()), list(self._chosen.values())
        self._logits, self._chosen = {}, {}
        if not logits:
            return None
        weights = (labels != IGNORED_LABEL).sum(dim=1).to(torch.float32) / len(logits)
        added = weights.new_zeros(())
        for layer, (scores, index) in enumerate(zip(logits, chosen, strict=True)):
            scores = scores.view(*labels.shape, -1)
            if self._auxiliary > 0:
                probabilities = self._probabilities(layer, scores).mean(dim=1)
                choices = torch.zeros_like(probabilities)
                index = index.reshape(len(labels), -1)
                choices.scatter_add_(1, index, torch.ones_like(index, dtype=choices.dtype))
                balance = (choices * probabilities).sum(dim=1) * scores.shape[2] / labels.shape[1]
                added = self._weighted("auxiliary_loss", added, weights * balance, self._auxiliary)
            if self._z > 0:
                squares = scores.float().logsumexp(dim=-1).square().mean(dim=1)
                added = self._weighted("z_loss", added, weights * squares, self._z)
        return added - added.detach()

    def _weighted(
        self, name: str, added: torch.Tensor, values: torch.Tensor, weight: float
    ) -> torch.Tensor:
        part = weight * values.sum()
        self._add(name, part.detach())
        return added + part

    def _add(self, name: str, value: torch.Tensor) -> None:
        value = value.double()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def take(self, process: Process, mesh: ProcessMesh, num_labels: float) -> Load | None:
        """Return the load since the last call, None without routers; all ranks call together."""
        if not self._layers:
            return None
        names = ("entropy", "passes", "auxiliary_loss", "z_loss")
        sums = [float(self._sums.get(name, 0.0)) for name in names]
        for layer, size in enumerate(self._sizes):
            counts = self._counts.get(layer)  # another pipeline stage has the layer
            sums += [0.0] * size if counts is None else counts.tolist()
        self._counts, self._sums = {}, {}
        # All ranks of a tensor group have the same sums.
        entropy, passes, auxiliary, z, *counted = process.sum(
            *(value if mesh.tensor.is_first else 0.0 for value in sums)
        )
        read = iter(map(int, counted))
        return Load(
            counts=[[next(read) for _ in range(size)] for size in self._sizes],
            entropy=entropy / max(1.0, passes),
            auxiliary_loss=auxiliary / max(1.0, num_labels) if self._auxiliary > 0 else None,
            z_loss=z / max(1.0, num_labels) if self._z > 0 else None,
        )

    def balance(self, load: Load) -> None:
        """Update the router biases after an optimizer step (arXiv:2408.15664, algorithm 1).

        Experts with fewer tokens than the mean become easier to choose, the others harder.
        """
        if self._rate == 0:
            return
        for router, row in zip(self._layers, load.counts, strict=True):
            bias = getattr(router, ROUTER_BIAS)
            counts = torch.tensor(row, dtype=torch.float64)
            bias += (self._rate * (counts.mean() - counts).sign()).to(bias)
