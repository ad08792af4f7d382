"""Gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162, section 2.2 and appendix A.1).

The gradient of a batch of B tokens is the true gradient plus noise: its squared norm is expected to
be |G|² + tr(Σ)/B. The norms of the micro-batches, of n tokens each, and of their sum, of N tokens,
give unbiased estimates of both terms:

    tr(Σ) = (mean |g_i|² - |g|²) / (mean 1/n_i - 1/N)
    |G|²  = |g|² - tr(Σ)/N

Both are averaged over steps before they are divided, because a ratio of noisy estimates is biased.
tr(Σ) / |G|², in tokens, is the batch size at which a step makes half the progress of a step with
the true gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from trainctl.options.callbacks import Callback, Context
from trainctl.options.callbacks.gradient_noise_scale import GradientNoiseScaleConfig


class GradientNoiseScale(Callback):
    """Measures the squared gradient norm of each micro-batch, by hooks on the parameters."""

    def __init__(self, keys: GradientNoiseScaleConfig) -> None:
        self._keys = keys
        self._hooks: list[RemovableHandle] = []
        self._squares: list[torch.Tensor] = []
        self._noise = self._signal = self._weight = 0.0

    def before_step(self, context: Context) -> None:
        self._remove_hooks()  # of a step that is repeated
        if context.step % self._keys.every_steps == 0:
            self._squares = []
            module = context.module
            self._hooks = [module.register_forward_pre_hook(self._begin_micro_batch)]
            for parameter in module.parameters():
                if parameter.requires_grad:
                    self._hooks.append(parameter.register_hook(self._add))

    def after_backward(self, context: Context) -> None:
        if not self._hooks:
            return
        self._remove_hooks()
        labels = context.micro_batch_labels
        own = torch.stack(self._squares).tolist()
        means = [square / n**2 for square, n in zip(own, labels, strict=True) if n]
        sums = context.collectives.sum(
            len(means), sum(labels), sum(1 / n for n in labels if n), sum(means)
        )
        count, tokens, inverse, small = sums
        if count < 2 or context.grad_norm is None:
            return  # a smaller batch at the start of a run: one micro-batch
        small *= (tokens / context.hook_scale) ** 2 / count
        large = context.grad_norm**2
        noise = (small - large) / (inverse / count - 1 / tokens)
        decay = self._keys.decay
        self._noise = decay * self._noise + (1 - decay) * noise
        self._signal = decay * self._signal + (1 - decay) * (large - noise / tokens)
        self._weight = decay * self._weight + (1 - decay)
        # Until there is more signal than error, the estimate of |G|² can be negative.
        scale = self._noise / self._signal if self._signal > 0 else None
        context.record(
            "noise_scale",
            tokens=scale,
            batches=None if scale is None else scale / tokens,
            noise=self._noise / self._weight,
            gradient_squared=self._signal / self._weight,
            batch_tokens=tokens,
        )

    def before_save(self) -> Mapping[str, Any]:
        return {"noise": self._noise, "signal": self._signal, "weight": self._weight}

    def after_load(self, state: Mapping[str, Any]) -> None:
        self._noise, self._signal = state.get("noise", 0.0), state.get("signal", 0.0)
        self._weight = state.get("weight", 0.0)

    def close(self) -> None:
        self._remove_hooks()

    def _begin_micro_batch(self, module: torch.nn.Module, inputs: Any) -> None:
        if module.training and torch.is_grad_enabled():  # not an objective's first pass
            device = next(module.parameters()).device
            self._squares.append(torch.zeros((), dtype=torch.float64, device=device))

    def _add(self, gradient: torch.Tensor) -> None:
        self._squares[-1] += gradient.detach().double().square().sum()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
