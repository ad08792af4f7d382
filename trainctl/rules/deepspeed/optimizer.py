"""Rules about the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec

from trainctl.config.suggest import did_you_mean, nearest_names
from trainctl.rules.deepspeed.case import AUTO, Case, is_number, json_text
from trainctl.rules.rule import LEFT_OUT, WARNING, Problem, rule

TESTED = ("adam", "adamw", "adagrad", "lion", "muon", "Adam", "AdamW")
"""Optimizers that runtime/zero/utils.py lists as tested; with offload, DeepSpeed's own kernels."""


@rule("TC250", "optimizer.type", refused="runtime/engine.py", example={"optimizer.type": "AdamZ"})
def the_optimizer_exists(case: Case) -> Iterator[Problem]:
    """optimizer.type is an optimizer of DeepSpeed or of torch.optim, in torch's spelling.

    Fix: Name an optimizer of DeepSpeed's or of torch.optim.
    """
    name = case.optimizer
    known = [*PRETTY.values(), *case.schema.torch_optimizers]
    if name is None or name in case.schema.optimizers or name in case.schema.torch_optimizers:
        return
    if name.lower() in ONE_BIT:
        yield Problem(
            f"{name} is gone: DeepSpeed {case.schema.deepspeed} has no 1-bit optimizer",
            f"{ONE_BIT[name.lower()]}, which sends whole gradients",
        )
        return
    hint = did_you_mean(nearest_names(name, known, count=1)) or f"one of {', '.join(known)}"
    yield Problem(f"there is no optimizer {json_text(name)}", hint)


@rule(
    "TC251",
    "optimizer.params.*",
    refused="runtime/engine.py",
    example={"optimizer.params.weight_decays": 0.1},
)
def the_optimizer_takes_its_parameters(case: Case) -> Iterator[Problem]:
    """optimizer.params holds only parameters of the optimizer.

    Fix: Leave the parameter out, or write its right name.
    """
    names = _accepted_parameters(case)
    if names is None:
        return
    for name in case.params("optimizer"):
        if name in names or name == "max_grad_norm":
            continue
        hint = did_you_mean(nearest_names(name, names, count=1))
        yield Problem(
            f"{case.get('optimizer.type')} takes no {name}",
            hint or f"it takes {', '.join(names)}",
            key=f"optimizer.params.{name}",
        )


@rule(
    "TC252",
    "optimizer.params.max_grad_norm",
    refused="runtime/engine.py",
    example={"optimizer.params.max_grad_norm": 1.0},
)
def clipping_is_not_the_optimizers(case: Case) -> Iterator[Problem]:
    """The maximum gradient norm is gradient_clipping, not a parameter of the optimizer.

    Fix: Set gradient_clipping at the top level.
    """
    params = case.params("optimizer")
    if "max_grad_norm" in params:
        yield Problem(
            "max_grad_norm is not a parameter of the optimizer",
            f"gradient_clipping={json_text(params['max_grad_norm'])} at the top level",
        )


@rule(
    "TC253",
    "optimizer.params.*",
    refused="runtime/engine.py",
    example={"optimizer.params.lr": "1e-5"},
)
def the_optimizer_can_use_its_numbers(case: Case) -> Iterator[Problem]:
    """Learning rate, betas, epsilon and weight decay are numbers in the optimizer's range.

    Fix: Write numbers, in the optimizer's range.
    """
    for name, value in case.params("optimizer").items():
        key = f"optimizer.params.{name}"
        if value == AUTO or value is None:
            continue
        if name in ("lr", "eps", "weight_decay", "momentum", "muon_lr", "adam_lr"):
            yield from _check_number(key, value)
        elif name == "betas":
            yield from _check_betas(key, value)


@rule(
    "TC254",
    "optimizer.type",
    refused="runtime/zero/utils.py",
    example={
        "zero_optimization.stage": 2,
        "zero_optimization.zenflow": LEFT_OUT,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": LEFT_OUT,
    },
)
def zero_knows_the_optimizer(case: Case) -> Iterator[Problem]:
    """An optimizer that DeepSpeed has not tested with ZeRO is allowed explicitly.

    Fix: Set zero_allow_untested_optimizer, or use AdamW.
    """
    name = case.optimizer
    if not case.stage or name is None or name in TESTED or name in PRETTY:
        return
    if name in case.schema.torch_optimizers and not case.get("zero_allow_untested_optimizer"):
        yield Problem(
            f"DeepSpeed has not tested {name} with ZeRO, and refuses it",
            "zero_allow_untested_optimizer=true, or optimizer.type=AdamW",
        )


@rule("TC255", "optimizer.type", refused="runtime/engine.py", example={"optimizer": LEFT_OUT})
def something_updates_the_weights(case: Case) -> Iterator[Problem]:
    """The JSON or the script gives an optimizer.

    Fix: Give an optimizer, in the JSON or in the script.
    """
    if case.around.has_optimizer is False and case.optimizer is None and not case.has(TYPE):
        yield Problem(
            "neither the JSON nor the script names an optimizer", 'optimizer.type="AdamW"'
        )


@rule(
    "TC256",
    "optimizer.type",
    refused="op_builder/cpu",
    example={
        "optimizer": {"type": "Lion", "params": {"lr": 0.0001}},
        "zero_optimization.offload_optimizer": LEFT_OUT,
    },
)
def the_optimizer_has_a_kernel(case: Case) -> Iterator[Problem]:
    """DeepSpeed's Lion and LAMB run on GPUs; on the CPU only an offloaded Lion does.

    A user's script gets DeepSpeed's own kernel of the optimizer, and the kernels of Lion and LAMB
    run on GPUs only.

    Fix: Use AdamW, or GPUs.
    """
    name = case.optimizer
    lacks = name == "lamb" or (name == "lion" and not case.is_offloaded)
    if case.on_cpu and lacks:
        yield Problem(
            f"{case.setting(TYPE)} is a GPU kernel of DeepSpeed, and the device is a CPU",
            case.names.fix(TYPE, "AdamW"),
        )


@rule(
    "TC257",
    "fp16.loss_scale",
    refused="runtime/engine.py",
    example={"optimizer": {"type": "Lamb", "params": {}}, "fp16": {"loss_scale": 128}},
)
def lamb_has_adaptive_loss_scale(case: Case) -> Iterator[Problem]:
    """LAMB in fp16 uses an adaptive loss scale.

    DeepSpeed's LAMB in fp16 supports an adaptive loss scale only.

    Fix: Set the loss scale to 0, which is adaptive.
    """
    key = "fp16.loss_scale"
    scale = case.get(key)
    if case.optimizer == "lamb" and is_number(scale) and scale != 0:
        yield Problem(
            f"{case.setting(key)} with {case.setting(TYPE)}: DeepSpeed's Lamb needs an adaptive "
            "one",
            case.names.fix(key, 0),
        )


@rule(
    "TC258",
    "zero_optimization.reduce_scatter",
    "zero_optimization.zero_quantized_gradients",
    refused="runtime/zero/stage3.py",
    example={
        "optimizer": {"type": "Muon", "params": {"lr": 0.001, "torch_adam": True}},
        "zero_optimization.stage": 3,
        "zero_optimization.reduce_scatter": True,
    },
)
def muon_sees_whole_gradients(case: Case) -> Iterator[Problem]:
    """Muon at ZeRO stage 3 runs without reduce_scatter and quantized gradients.

    Muon orthogonalizes whole matrices, so at stage 3 it gathers gradients itself; a reduce-scatter
    would leave it slices.

    Fix: Set reduce_scatter to false, or use stage 2.
    """
    if case.optimizer != "muon" or case.stage != 3:
        return
    for name in ("reduce_scatter", "zero_quantized_gradients"):
        key = f"zero_optimization.{name}"
        if case.get(key):
            fix = case.names.fix
            yield Problem(
                f"{case.setting(TYPE)} at ZeRO stage 3 cannot go with {case.names.key(key)}",
                f"{fix(key, False)}, or {fix('zero_optimization.stage', 2)}",
                key=key,
            )


@rule(
    "TC259",
    "optimizer.type",
    severity=WARNING,
    silent="runtime/config.py",
    example={"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1, "torch_adam": True}}},
)
def adam_decays_as_adamw(case: Case) -> Iterator[Problem]:
    """Adam with weight decay is decoupled, as AdamW.

    DeepSpeed's Adam is AdamW unless adam_w_mode is false.

    Fix: Name AdamW, or set adam_w_mode to false.
    """
    params = case.params("optimizer")
    decay = params.get("weight_decay", 0)
    decays = is_number(decay) and decay > 0
    if case.optimizer == "adam" and decays and params.get("adam_w_mode", True):
        yield Problem(
            f"Adam with weight_decay={decay:g} is AdamW here: the decay is decoupled",
            "optimizer.type=AdamW says the same; optimizer.params.adam_w_mode=false is Adam",
        )


@rule(
    "TC260",
    "optimizer.type",
    refused="runtime/engine.py",
    example={"optimizer": {"type": "MuAdam", "params": {}}},
)
def another_packages_optimizer_is_installed(case: Case) -> Iterator[Problem]:
    """The package of MuAdam, MuAdamW and MuSGD is installed.

    Fix: Install mup, or use AdamW.
    """
    if case.optimizer in ("muadam", "muadamw", "musgd") and find_spec("mup") is None:
        yield Problem(f"{case.get(TYPE)} needs the package mup", "pip install mup")


@rule(
    "TC261",
    "optimizer.type",
    later="runtime/engine.py",
    example={"optimizer": {"type": "SparseAdam", "params": {}}, "scheduler": LEFT_OUT},
)
def the_optimizer_steps_without_help(case: Case) -> Iterator[Problem]:
    """The optimizer needs neither a closure nor sparse gradients.

    The engine calls the optimizer without a closure, with dense gradients.

    Fix: Use AdamW.
    """
    reasons = {"LBFGS": "needs a closure for its step", "SparseAdam": "takes sparse gradients only"}
    name = case.optimizer or ""
    if name in reasons:
        yield Problem(f"{name} {reasons[name]}, and the engine has none", "AdamW")


@rule(
    "TC262",
    "*.type",
    later="runtime/config.py",
    example={"scheduler": {"params": {"warmup_num_steps": 10}}},
)
def blocks_have_a_type(case: Case) -> Iterator[Problem]:
    """An optimizer or scheduler block has a type.

    Without one its parameters are ignored.

    Fix: Name a type, or leave the block out.
    """
    for section in ("optimizer", "scheduler"):
        block = case.json.get(section)
        if isinstance(block, Mapping) and block.get("type") is None:
            yield Problem(
                f"{section} has no type: the block is ignored",
                f"{section}.type, or leave {section} out",
                key=f"{section}.type",
            )


@rule(
    "TC263",
    "gradient_clipping",
    severity=WARNING,
    silent="runtime/constants.py",
    example={"gradient_clipping": LEFT_OUT},
)
def clipping_is_chosen(case: Case) -> Iterator[Problem]:
    """gradient_clipping is given.

    DeepSpeed's default is 1.0, not off.

    Fix: Write gradient_clipping; 0 switches it off.
    """
    if not case.has("gradient_clipping"):
        yield Problem(
            "gradients are clipped to a norm of 1.0: DeepSpeed's default, where nothing is said",
            "gradient_clipping=1.0 says it; 0 switches it off",
        )


TYPE = "optimizer.type"
ONE_BIT = {"onebitadam": "AdamW", "zerooneadam": "AdamW", "onebitlamb": "Lamb"}
"""1-bit optimizers of earlier versions, each with its replacement."""
PRETTY = {
    "adamw": "AdamW",
    "adam": "Adam",
    "adagrad": "Adagrad",
    "lamb": "Lamb",
    "lion": "Lion",
    "muon": "Muon",
    "muadam": "MuAdam",
    "muadamw": "MuAdamW",
    "musgd": "MuSGD",
}
"""Usual spelling of DeepSpeed's own optimizers."""


def _accepted_parameters(case: Case) -> tuple[str, ...] | None:
    """Return the names that `optimizer.params` may hold; None if unknown."""
    name = case.optimizer
    if name in case.schema.torch_optimizers:
        return case.schema.torch_optimizers[name or ""]
    variants = case.schema.optimizers.get(name or "", {})
    if not variants:
        return None
    params = case.params("optimizer")
    variant = "offloaded" if case.is_offloaded else "device"
    if params.get("torch_adam") and "torch" in variants:
        variant = "torch"
    return variants.get(variant, variants["device"])


def _check_number(key: str, value: object) -> Iterator[Problem]:
    name = key.rpartition(".")[2]
    if not is_number(value):
        hint = ""
        if isinstance(value, str):
            with suppress(ValueError):
                hint = f"write {float(value):g}, without quotes"
        yield Problem(f"{name}={json_text(value)} is not a number", hint, key=key)
    elif value < 0:  # type: ignore[operator]
        yield Problem(f"{name}={json_text(value)} is below 0", "0 or more", key=key)


def _check_betas(key: str, value: object) -> Iterator[Problem]:
    if not isinstance(value, list) or len(value) != 2 or not all(is_number(b) for b in value):
        yield Problem(
            f"betas={json_text(value)} is not a list of two numbers", "[0.9, 0.95]", key=key
        )
    elif not all(0 <= beta < 1 for beta in value):
        yield Problem(f"betas={json_text(value)} are not both in [0, 1)", "[0.9, 0.95]", key=key)
