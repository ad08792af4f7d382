"""Gradients in host memory, and the norms that DeepSpeed takes while it copies them there."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trainctl.engines.deepspeed.wrappers.base import Wrapper
from trainctl.engines.fragments import Fragment, square
from trainctl.engines.protocol import Change


class OnHost(Wrapper):
    """Mixin for optimizers in host memory; it comes before the wrapper's class."""

    def _gradient(self, index: int) -> list[torch.Tensor]:
        gradient = self.tensors[index].grad
        return [] if gradient is None else [gradient]

    def _change(self, index: int, change: Change) -> None:
        super()._change(index, change)
        for fragment, _, values in self._cut(index):  # one part per fragment: the gradient is flat
            self._wrapper.norm_for_param_grads[self._key(fragment)] = square(values).sqrt().float()

    def _noted_squares(self, index: int) -> Iterator[tuple[Fragment, torch.Tensor]]:
        """Yield sums of squares from the norms that DeepSpeed took, without reading gradients from
        NVMe.
        """
        for fragment in self._by_tensor[index]:
            norm = self._wrapper.norm_for_param_grads.get(self._key(fragment))
            if fragment.owned and norm is not None:
                yield fragment, torch.as_tensor(norm).double().cpu().square()

    def _key(self, fragment: Fragment) -> int:
        return int(self._wrapper.get_param_id(self._parameters[fragment.name]))
