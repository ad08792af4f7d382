"""Protocol of a torch module that trains without transformers (`model=module`). No torch is loaded.

A function returns the module, and takes its arguments (`model.arguments`) as one dataclass:

    @dataclass
    class Sizes:
        vocab_size: int = 264
        width: int = 64

    def model(sizes: Sizes) -> nn.Module: ...

The module needs `forward` alone. The other methods are looked up by name, so that no base class is
needed; each has a default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn


class ModuleProtocol(Protocol):
    """Methods of a trainable module; all but `forward` are optional."""

    masks_documents: bool = False
    """Whether `forward` keeps documents of one sequence apart: a document begins wherever
    `position_ids` are 0. Without it `data.mask_documents` is refused.
    """

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Return the logits, (samples, length, vocabulary), as the result or first in it.

        A module with `logits` returns the last hidden states instead. Both arguments are (samples,
        length). A token must not depend on later ones.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of last hidden states, token by token.

        Only if `forward` returns last hidden states.
        """

    def blocks(self) -> Sequence[nn.Module]:
        """Return the blocks in order: what is recomputed, wrapped and counted as one.

        A block takes its hidden states as its first argument and returns them, alone or first in a
        tuple. May also be an attribute. Default: the `ModuleList` with most parameters.
        """

    def no_decay(self) -> Sequence[str]:
        """Return names of parameters that no weight decay applies to.

        Default: vectors and embeddings, as for every model. Beside the named ones these stay.
        """

    def initialize(self, name: str, tensor: torch.Tensor) -> None:
        """Set the initial values of a parameter in place.

        Called for each parameter. Each element is drawn from (seed, name, index), so that a rank
        computes its own part alone. Default: what the constructors of the module do.
        """

    def tensor_plan(self) -> Mapping[str, str]:
        """Return how tensor ranks split layers, by pattern of their name.

        The words are those of transformers' `base_model_tp_plan`: `colwise`, `rowwise` and
        `replicated_with_grad_allreduce`. `*` stands for one part of a name.
        """

    def pipeline_plan(self) -> Sequence[str]:
        """Return the names of the parts of the module in the order in which `forward` uses them."""

    def flops_per_token(self, sequence_length: int) -> float:
        """Return floating point operations per token of forward and backward pass.

        Default: products of matrices and attention, as torch counts them, three times.
        """
