"""Specification of an optimizer: supported settings, states, memory.

ZeRO gives an optimizer flat pieces of parameters. An elementwise rule gives the same results on
pieces. A rule on whole matrices (Muon, Adafactor), whole tensors (LAMB) or blocks of them (8-bit
AdamW) would silently compute something else, as DeepSpeed's and torch's implementations do. So
those four are trainctl's own (`trainctl.train.optimizers`): they know which piece of which
parameter they hold, and get what they lack from the other ranks. Results are the same at every ZeRO
stage and, but for 8-bit AdamW, over tensor ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from trainctl.config.registry import Spec, spec_lookup
from trainctl.config.schema import OffloadDevice, OptimizerConfig
from trainctl.config.schema.option import option

ELEMENT = "the element"
"""Value of `Optimizer.needs` for elementwise rules, which may get any piece of a parameter."""


class Maker(Enum):
    """Package whose code makes the update."""

    torch = "torch"
    deepspeed = "DeepSpeed"
    trainctl = "trainctl"


class WidthRule(Enum):
    """Scaling of learning rates with the width under muP: a column of its table (`plan.mup`)."""

    adam = "adam"
    """Entries of a step have the size of the learning rate, whatever the gradient's size."""
    sgd = "sgd"
    spectral = "spectral"
    """Steps of matrices have a spectral norm of the learning rate's size; others follow Adam."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Temporary memory of one update: the maximum over several moments of it."""

    moments: tuple[tuple[int, int], ...] = ((0, 0),)
    """Pairs, one for each moment: bytes per element updated at once, and bytes per element of the
    largest parameter among them.
    """
    whole_tensors: bool = False
    """Whether a parameter counts whole even if a rank holds only a part of it."""
    by_tensor: bool = False
    """Whether, without ZeRO, parameters are updated one at a time."""
    at_most: int | None = None
    """Elements of a parameter that are updated at once; None means all."""

    def temporary_bytes(self, at_once: int, largest: int) -> int:
        """Return the bytes of the temporaries of an update of `at_once` elements.

        `largest` is the size of the largest parameter.
        """
        part = largest if self.whole_tensors else min(largest, at_once, self.at_most or largest)
        return max(each * at_once + tensor * part for each, tensor in self.moments)


KERNEL = Update()
"""Fused kernel: temporaries are in registers."""

FOREACH = Update(moments=((4, 0),))
"""torch's Adam on all tensors of an accelerator together: the root of the second moment."""

PLAIN = Update(moments=((8, 0),), by_tensor=True)
"""torch's Adam tensor by tensor: the root, and the root divided by its bias correction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerParameter:
    """One parameter of DeepSpeed's JSON and trainctl's equivalent keys; converted both ways."""

    name: str
    keys: tuple[str, ...]
    """Names in the section: one, or one for each entry of a list."""
    default: Any = None
    """Default of DeepSpeed's class, which applies if a JSON does not set the parameter."""
    is_rate: bool = False
    """Whether it is a learning rate, which scales with the batch size."""
    is_epsilon: bool = False
    """Whether it is an epsilon, which scales with the gradients under muP."""
    or_lr: bool = False
    """Whether `lr` applies if the key is null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerForm:
    """An optimizer in DeepSpeed's JSON."""

    type: str
    """Value of `optimizer.type` that trainctl writes."""
    also: tuple[str, ...] = ()
    """Other values of `optimizer.type` that are read as this optimizer, in lower case."""
    parameters: tuple[OptimizerParameter, ...]
    """All parameters, in the order of the JSON; `lr` and `weight_decay` first."""
    fixed: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Parameters whose values select this optimizer, each with the reason."""
    has_torch_adam: bool = False
    """Whether `torch_adam` selects torch's class in place of DeepSpeed's."""
    is_zero_tested: bool = False
    """Whether DeepSpeed lists its class as tested with ZeRO (runtime/zero/utils.py)."""

    def matches(self, name: str, params: Mapping[str, Any]) -> bool:
        """Return True if DeepSpeed takes an optimizer with this name and these parameters for this
        one.
        """
        is_named = name.lower() in (self.type.lower(), *self.also)
        return is_named and all(params.get(key) == value for key, (value, _) in self.fixed.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer(Spec):
    """Specification of one optimizer: what it supports, what it needs, and its form in DeepSpeed's
    JSON.
    """

    needs: str
    """The part of a parameter on which the update of one element depends."""
    states: tuple[str, ...]
    """State tensors with the size of their parameters."""
    states_need: str = ""
    """Key that, at 0, leaves the optimizer without state; empty if none."""
    matrix_states: tuple[str, ...] = ()
    """State tensors of matrices with a rule of their own; empty if there is no such rule."""
    matrix_lr: str = ""
    """Key of the matrices' learning rate; its value null means `lr`."""
    state_bytes: float | None = None
    """Bytes per element of a state; None if `precision` decides."""
    has_factored_states: bool = False
    """Whether the second moment is kept as rows and columns of each matrix."""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages that it supports."""
    offload: tuple[OffloadDevice, ...] = (OffloadDevice.none,)
    """Devices that may hold its states."""
    offload_variants: tuple[str, ...] = ()
    """Keys of `offload` (such as `zenflow`) whose implementation supports this optimizer."""
    tensor: bool = True
    """Whether parameters may be split over tensor-parallel ranks."""
    low_precision_states: bool = False
    """Whether the states may be kept in bf16."""
    why_not: Mapping[str, str] = field(default_factory=dict)
    """Reasons, by the name of what is not supported."""
    made_by: Maker = Maker.trainctl
    """Maker of the update on a device."""
    made_on_host_by: Maker | None = None
    """Maker of the update of states in host memory; None means `made_by`."""
    fused_by: Maker | None = None
    """Maker of a fused kernel on an accelerator; None if there is no such kernel."""
    is_ours_because: str = ""
    """Reason why trainctl has its own implementation; empty means that ZeRO cuts parameters
    anywhere.
    """
    has_cpu_kernel: bool = True
    """Whether DeepSpeed can update its states in host memory."""
    host_operator: str = "cpu_adam"
    """Operator that DeepSpeed compiles for that with trainctl's trainer; empty for none."""
    device_operator: str = ""
    """Operator that DeepSpeed compiles for its own kernel on a GPU, its only implementation."""
    update: Update | None = None
    """Temporary memory of an update by trainctl's code; None means the memory of torch's AdamW."""
    matrix_update: Update | None = None
    """Temporary memory of the matrices' update, if the compute format has two bytes; the bytes per
    element of the largest matrix scale with the format.
    """
    all_reduces: int = 0
    """All-reduces in the update of a tensor that several ranks share."""
    width_rule: WidthRule | None = None
    """Column of muP's table; None if no column is known to hold."""
    decays_gradient: bool = False
    """Whether the weight decay is added to the gradient."""
    deepspeed: OptimizerForm | None = None
    """Form in DeepSpeed's JSON; None if DeepSpeed has no such optimizer."""

    @property
    def is_elementwise(self) -> bool:
        """Whether the update of one element depends on that element alone."""
        return self.needs == ELEMENT

    @property
    def has_matrix_rule(self) -> bool:
        """Whether matrices of the blocks are updated by a rule of their own."""
        return bool(self.matrix_states)

    def states_of(self, section: OptimizerConfig, *, is_matrix: bool) -> tuple[str, ...]:
        """Return the names of a group's state tensors, whoever makes the update.

        Args:
            is_matrix: Whether the rule for matrices updates the group.
        """
        if self.states_need and not getattr(section, self.states_need):
            return ()
        return self.matrix_states if is_matrix else self.states


spec_of = spec_lookup(OptimizerConfig, Optimizer)
"""Return the specification of the configured optimizer."""


@dataclass
class WithBetas(OptimizerConfig):
    """Keys of an optimizer with two moving averages."""

    beta1: float = option(0.9, "Decay rate of the first moment.", minimum=0, maximum=0.999999)
    beta2: float = option(0.95, "Decay rate of the second moment.", minimum=0, maximum=0.999999)


@dataclass
class WithMoments(WithBetas):
    """Keys of an optimizer with Adam's two moments."""

    epsilon: float = option(1e-8, "Epsilon, added to the root of the second moment.", above=0)


HOST = (OffloadDevice.none, OffloadDevice.cpu)
EVERYWHERE = (*HOST, OffloadDevice.nvme)

NO_HOST_KERNEL = "DeepSpeed has no kernel that updates its states in host memory"
NO_SWAP = "DeepSpeed's swapper holds the four tensors of Adam"
ROUNDED = "a momentum in bf16 drops what a step adds to it"


def parameters(
    lr: float, *others: OptimizerParameter, weight_decay: float = 0.0
) -> tuple[OptimizerParameter, ...]:
    """Return the parameters of an optimizer in DeepSpeed's JSON: the shared ones, then `others`.

    `lr` and `weight_decay` are the defaults of DeepSpeed's class.
    """
    return (
        OptimizerParameter(name="lr", keys=("lr",), default=lr, is_rate=True),
        OptimizerParameter(name="weight_decay", keys=("weight_decay",), default=weight_decay),
        *others,
    )


def betas_parameter(beta1: float, beta2: float) -> OptimizerParameter:
    """Return the parameter of the two decay rates, one list in the JSON."""
    return OptimizerParameter(name="betas", keys=("beta1", "beta2"), default=[beta1, beta2])


def eps_parameter(default: float = 1e-8) -> OptimizerParameter:
    """Return the parameter of the epsilon."""
    return OptimizerParameter(name="eps", keys=("epsilon",), default=default, is_epsilon=True)


ADAM = parameters(1e-3, betas_parameter(0.9, 0.999), eps_parameter())
