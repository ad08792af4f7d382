"""What an optimizer says of itself: what it can be trained with, settings, states, memory.

ZeRO gives an optimizer flat pieces of parameters. To an elementwise rule that is all the same; one
that looks at whole matrices (Muon, Adafactor), whole tensors (LAMB) or blocks of them (8-bit AdamW)
would compute something else, silently. DeepSpeed's and torch's do. So those four are trainctl's own
(`trainctl.train.optimizers`): they know which piece of which parameter they have and ask the
other ranks for what they lack, which gives the same numbers at every ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from trainctl.config.registry import Spec, load
from trainctl.config.schema import OffloadDevice, OptimizerConfig
from trainctl.config.schema.option import option

ELEMENT = "the element"
"""What elementwise rules need: to them the pieces of a parameter are all the same."""


class Maker(Enum):
    """Whose code makes the update."""

    torch = "torch"
    deepspeed = "DeepSpeed"
    trainctl = "trainctl"


class WidthRule(Enum):
    """How learning rates follow the width under muP: a column of its table (`plan.mup`)."""

    adam = "adam"
    """A step has entries of the learning rate's size, whatever the gradient's."""
    sgd = "sgd"
    spectral = "spectral"
    """A step of matrices has a spectral norm of the learning rate's size; the rest is Adam's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Temporaries of one update: the most of some moments."""

    moments: tuple[tuple[int, int], ...] = ((0, 0),)
    """Bytes per element of what is updated at once, and per element of the largest parameter in it,
    at each moment."""
    whole_tensors: bool = False
    """Whether a parameter counts whole where a rank has a part of it only."""
    by_tensor: bool = False
    """Whether, without ZeRO, each parameter is updated by itself."""
    at_most: int | None = None
    """Elements of a parameter that are updated at once; None is all."""

    def bytes(self, at_once: int, largest: int) -> int:
        """Return bytes of an update of `at_once` elements, whose largest parameter has
        `largest`."""
        part = largest if self.whole_tensors else min(largest, at_once, self.at_most or largest)
        return max(each * at_once + tensor * part for each, tensor in self.moments)


KERNEL = Update()
"""One kernel keeps what it needs in registers."""

FOREACH = Update(moments=((4, 0),))
"""torch's Adam on all tensors of an accelerator together: the root of the second moment."""

PLAIN = Update(moments=((8, 0),), by_tensor=True)
"""torch's Adam tensor by tensor: the root, and the root divided by its correction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerParameter:
    """One parameter of DeepSpeed's JSON, and the keys of ours that say the same; both ways."""

    name: str
    keys: tuple[str, ...]
    """Names in the section: one, or one for each entry of a list."""
    default: Any = None
    """That of DeepSpeed's class, which holds where a JSON says nothing."""
    is_rate: bool = False
    """Whether it is a learning rate, which follows the batch size."""
    is_epsilon: bool = False
    """Whether it is as small as the gradients are, under muP."""
    or_lr: bool = False
    """Whether `lr` holds where the key is null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerForm:
    """An optimizer as DeepSpeed's JSON names it."""

    type: str
    """As it is written."""
    also: tuple[str, ...] = ()
    """Other names that are read as it, in lower case."""
    parameters: tuple[OptimizerParameter, ...]
    """All of them, in the order of the JSON; `lr` and `weight_decay` first."""
    fixed: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Parameters that make it this one, and why."""
    has_torch_adam: bool = False
    """Whether `torch_adam` chooses torch's class in place of DeepSpeed's."""
    is_zero_tested: bool = False
    """Whether DeepSpeed lists its class as tested with ZeRO (runtime/zero/utils.py)."""

    def matches(self, name: str, params: Mapping[str, Any]) -> bool:
        """Whether a JSON's optimizer of that name, as DeepSpeed takes it, is this one."""
        is_named = name.lower() in (self.type.lower(), *self.also)
        return is_named and all(params.get(key) == value for key, (value, _) in self.fixed.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer(Spec):
    """What one kind of optimizer allows, needs and becomes."""

    needs: str
    """What of a parameter one element's update depends on."""
    states: tuple[str, ...]
    """Tensor states of the size of what they are for."""
    states_need: str = ""
    """A key without which, at 0, it has no state; empty if none."""
    matrix_states: tuple[str, ...] = ()
    """Those of the matrices that it updates by a rule of their own, if it does."""
    matrix_lr: str = ""
    """The key of those matrices' learning rate; null there means `lr`."""
    state_bytes: float | None = None
    """Bytes of an element of a state; None is what `precision` says."""
    has_factored_states: bool = False
    """Whether the second moment is rows and columns of each matrix."""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    offload: tuple[OffloadDevice, ...] = (OffloadDevice.none,)
    """Places of its states."""
    offload_variants: tuple[str, ...] = ()
    """Keys of `offload` whose way of updating knows this rule."""
    tensor: bool = True
    """Whether parameters may be cut over tensor-parallel ranks."""
    low_precision_states: bool = False
    """Whether the states may be kept in bf16."""
    why_not: Mapping[str, str] = field(default_factory=dict)
    """Reasons, by the name of what is not allowed."""
    made_by: Maker = Maker.trainctl
    """Whose code updates on a device."""
    made_on_host_by: Maker | None = None
    """Whose updates states in host memory; None is `made_by`."""
    fused_by: Maker | None = None
    """Whose kernel updates all on an accelerator; None has none."""
    is_ours_because: str = ""
    """Why it is trainctl's; empty says that its pieces are cut anywhere."""
    has_cpu_kernel: bool = True
    """Whether DeepSpeed can update its states in host memory."""
    host_operator: str = "cpu_adam"
    """What DeepSpeed compiles for that, with trainctl's trainer; empty for nothing."""
    device_operator: str = ""
    """What it compiles for its own kernel on a GPU, the only one that it has."""
    update: Update | None = None
    """Temporaries of an update by trainctl's code; None is torch's AdamW."""
    matrix_update: Update | None = None
    """Those of its matrices, for each two bytes of the format of computing."""
    width_rule: WidthRule | None = None
    """Its column of muP's table; None has none that is known to hold."""
    decays_gradient: bool = False
    """Whether the weight decay is a part of the gradient."""
    deepspeed: OptimizerForm | None = None
    """As DeepSpeed's JSON has it; None if it cannot."""

    @property
    def is_elementwise(self) -> bool:
        """Whether one element's update depends on that element alone."""
        return self.needs == ELEMENT

    @property
    def has_matrix_rule(self) -> bool:
        """Whether matrices of the blocks are updated by a rule of their own."""
        return bool(self.matrix_states)

    def states_of(self, section: OptimizerConfig, *, is_matrix: bool) -> tuple[str, ...]:
        """Tensor states of a group, of the size of its parameters; whoever makes the update.

        Args:
            is_matrix: Whether the rule of matrices updates the group.
        """
        if self.states_need and not getattr(section, self.states_need):
            return ()
        return self.matrix_states if is_matrix else self.states

    def matrix_rate(self, section: OptimizerConfig) -> float | None:
        """Return the peak learning rate of its matrices, if it is another than `lr`."""
        return getattr(section, self.matrix_lr) if self.matrix_lr else None


def spec_of(section: OptimizerConfig) -> Optimizer:
    """Of the kind that a configuration has.

    Raises:
        TrainctlError: A package that brings it is not installed here.
    """
    spec = load("optimizer", section.kind)
    assert isinstance(spec, Optimizer)
    return spec


@dataclass
class WithBetas(OptimizerConfig):
    """Of two moving averages."""

    beta1: float = option(0.9, "Decay of the first moment.", minimum=0, maximum=0.999999)
    beta2: float = option(0.95, "Decay of the second moment.", minimum=0, maximum=0.999999)


@dataclass
class WithMoments(WithBetas):
    """Of Adam's two moments."""

    epsilon: float = option(1e-8, "Added to the root of the second moment.", above=0)


HOST = (OffloadDevice.none, OffloadDevice.cpu)
EVERYWHERE = (*HOST, OffloadDevice.nvme)

NO_HOST_KERNEL = "DeepSpeed has no kernel that updates its states in host memory"
NO_SWAP = "DeepSpeed's swapper holds the four tensors of Adam"
ROUNDED = "a momentum in bf16 drops what a step adds to it"
CUT = "a tensor rank has only a shard of a matrix"


def parameters(
    lr: float, *others: OptimizerParameter, weight_decay: float = 0.0
) -> tuple[OptimizerParameter, ...]:
    """Those of every optimizer, with the defaults of DeepSpeed's class, and its own."""
    return (
        OptimizerParameter(name="lr", keys=("lr",), default=lr, is_rate=True),
        OptimizerParameter(name="weight_decay", keys=("weight_decay",), default=weight_decay),
        *others,
    )


def betas(beta1: float, beta2: float) -> OptimizerParameter:
    """Return the two decays, which the JSON has in one list."""
    return OptimizerParameter(name="betas", keys=("beta1", "beta2"), default=[beta1, beta2])


def eps(default: float = 1e-8) -> OptimizerParameter:
    """Return the smallest divisor."""
    return OptimizerParameter(name="eps", keys=("epsilon",), default=default, is_epsilon=True)


ADAM = parameters(1e-3, betas(0.9, 0.999), eps())
