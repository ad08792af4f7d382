"""Runs inside a rank for `test_optimizers`: real engines compared with reference optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from rank_processes import Case
from torch import nn
from torchao.optim import AdamW8bit

from trainctl.config.schema import OptimizerConfig
from trainctl.engines.process import Process
from trainctl.train.session import assemble

Step = Callable[[], None]


def distances(cases: list[Case], process: Process) -> list[dict[str, float]]:
    """Return how far the weights of each case are from a reference's; a case has one process, no
    ZeRO.

    The reference gets the engine's gradients, so that only the updates are compared.

    Returns:
        For each case and parameter, the largest difference at any step, divided by the largest
        change of the parameter in a step, so that small updates count as much as large ones.
    """
    return [_distance(case, process) for case in cases]


def _distance(case: Case, process: Process) -> dict[str, float]:
    session = assemble(case.plan, case.run, process)
    engine, optimizer = session.engine, case.plan.config.optimizer
    own = {piece.name: parameter for parameter, piece in engine.pieces.items()}
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in own.items()}
    groups = [
        {
            "params": [copies[engine.pieces[p].name] for p in group["params"]],
            "weight_decay": group["weight_decay"],
            "uses_muon": group["uses_muon"],
            "peak_lr": group["peak_lr"],
            "lr": 0.0,
        }
        for group in engine.deepspeed.optimizer.param_groups
    ]
    steps = list(_reference(optimizer, groups))
    worst = dict.fromkeys(own, 0.0)
    for step in range(case.plan.stop_step):
        batch = case.plan.batch
        engine.accumulate(session.training.step(step * batch.global_batch_size, batch))
        before = {name: p.detach().clone() for name, p in own.items()}
        for name, parameter in own.items():
            copies[name].grad = parameter.grad.detach().clone()
        factor = 1 / (1 + step)
        for group in groups:
            group["lr"] = group["peak_lr"] * factor
        engine.set_learning_rate(factor)
        engine.update(norm=1.0, clip_at=None)
        for each in steps:
            each()
        for name, parameter in own.items():
            moved = (parameter - before[name]).abs().max()
            off = (parameter - copies[name]).abs().max()
            worst[name] = max(worst[name], float(off / moved))
    engine.close()
    return worst


def _reference(optimizer: OptimizerConfig, groups: list[dict[str, Any]]) -> Iterator[Step]:
    """Build steps of reference optimizers over the groups; each step reads the groups' `lr`."""
    kind = optimizer.kind
    betas = tuple(getattr(optimizer, name, 0.0) for name in ("beta1", "beta2"))
    eps, momentum = (getattr(optimizer, name, 0.0) for name in ("epsilon", "momentum"))
    moments: dict[Any, Any] = {"step": 0}
    if kind == "lion":
        yield lambda: _lion(groups, betas, moments)
    elif kind == "lamb":
        yield lambda: _lamb(groups, betas, eps, moments)
    elif kind == "adamw_8bit":
        yield _eight_bit(groups, betas, eps)
    elif kind == "muon":
        matrices = [group for group in groups if group["uses_muon"]]
        others = [group for group in groups if not group["uses_muon"]]
        yield lambda: _muon(matrices, momentum, moments)
        yield _of(torch.optim.AdamW(_plain(others), betas=betas, eps=eps), others)
    else:
        plain = _plain(groups)
        factories: dict[str, Callable[[], torch.optim.Optimizer]] = {
            "adamw": lambda: torch.optim.AdamW(plain, betas=betas, eps=eps),
            "adam": lambda: torch.optim.Adam(plain, betas=betas, eps=eps),
            "sgd": lambda: torch.optim.SGD(plain, momentum=momentum),
            "adafactor": lambda: torch.optim.Adafactor(plain, eps=(eps**0.5, 1e-3)),
        }
        yield _of(factories[kind](), groups)


def _plain(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: group[name] for name in ("params", "weight_decay", "lr")} for group in groups]


def _of(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Step:
    def step() -> None:
        for theirs, group in zip(optimizer.param_groups, groups, strict=True):
            theirs["lr"] = group["lr"]
        optimizer.step()

    return step


def _eight_bit(groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> Step:
    optimizer = AdamW8bit(_plain(groups), betas=betas, eps=eps)

    def step() -> None:
        for theirs, group in zip(optimizer.param_groups, groups, strict=True):
            theirs["lr"].fill_(group["lr"])
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()

    return step


@torch.no_grad()
def _lion(
    groups: list[dict[str, Any]], betas: tuple[float, float], moments: dict[Any, Any]
) -> None:
    """Step by Algorithm 2 of arXiv:2302.06675."""
    for group in groups:
        for p in group["params"]:
            m = moments.get(p, torch.zeros_like(p))
            update = torch.sign(betas[0] * m + (1 - betas[0]) * p.grad)
            p.sub_(group["lr"] * (update + group["weight_decay"] * p))
            moments[p] = betas[1] * m + (1 - betas[1]) * p.grad


@torch.no_grad()
def _muon(groups: list[dict[str, Any]], momentum: float, moments: dict[Any, Any]) -> None:
    """Step as torch.optim.Muon does (2.13), but in fp32 where torch rounds to bf16."""
    for group in groups:
        for p in group["params"]:
            buffer = moments.setdefault(p, torch.zeros_like(p))
            buffer.lerp_(p.grad, 1 - momentum)
            x = p.grad.lerp(buffer, momentum)
            tall = x.shape[0] > x.shape[1]
            x = x.T if tall else x
            x = x / x.norm()
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            x = x.T if tall else x
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(x, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


@torch.no_grad()
def _lamb(
    groups: list[dict[str, Any]], betas: tuple[float, float], eps: float, moments: dict[Any, Any]
) -> None:
    """Step by Algorithm 2 of arXiv:1904.00962, with the identity for phi; vectors are not
    scaled.
    """
    moments["step"] += 1
    t = moments["step"]
    for group in groups:
        for p in group["params"]:
            m, v = moments.get(p, (torch.zeros_like(p), torch.zeros_like(p)))
            m = betas[0] * m + (1 - betas[0]) * p.grad
            v = betas[1] * v + (1 - betas[1]) * p.grad**2
            moments[p] = m, v
            r = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
            r = r + group["weight_decay"] * p
            ratio = p.norm() / r.norm() if p.dim() > 1 else 1.0
            p.sub_(group["lr"] * ratio * r)
