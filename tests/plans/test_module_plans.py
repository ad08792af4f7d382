"""Arguments of a module's function, and what the plan says of a module."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
from module_cases import module_config

from trainctl.config.check import arguments_class, call_function, check_arguments
from trainctl.config.codec import from_plain, to_plain
from trainctl.config.schema import RunConfig
from trainctl.errors import ExitCode, TrainctlError
from trainctl.hardware import resolve_hardware
from trainctl.plans.identity import model_identity
from trainctl.rules.resolve import resolve


class Kind(Enum):
    near, far = "near", "far"


@dataclass
class Sizes:
    depth: int
    width: int = 64
    rate: float = 0.1
    kind: Kind = Kind.near
    places: list[int] = field(default_factory=list)


@dataclass
class Heads:
    width: int = 64
    head: int = field(init=False)

    def __post_init__(self) -> None:
        self.head = self.width // 4


def make(sizes: Sizes) -> Sizes:
    return sizes


def test_arguments_are_completed_and_given_as_the_user_s_dataclass() -> None:
    given = {"depth": 2, "rate": 1, "kind": "far", "places": [1, 2]}
    complete = check_arguments(arguments_class(make, "f"), given, "model.arguments")
    assert complete == {**given, "width": 64, "rate": 1.0}
    assert call_function(make, given, "f") == Sizes(2, 64, 1.0, Kind.far, [1, 2])
    assert call_function(lambda: 3, {}, "f") == 3


@pytest.mark.parametrize(
    ("given", "words", "hint"),
    [
        ({"depth": 2, "widht": 3}, "no key model.arguments.widht", "model.arguments.width?"),
        ({"depth": "deep"}, "expected a whole number", "whole number"),
        ({"depth": 2, "kind": "fra"}, "not a legal value", "did you mean far?"),
        ({}, "no default", "model.arguments.depth="),
    ],
)
def test_wrong_arguments_name_the_nearest(given: dict[str, Any], words: str, hint: str) -> None:
    with pytest.raises(TrainctlError) as caught:
        check_arguments(Sizes, given, "model.arguments")
    (found,) = caught.value.findings
    assert caught.value.exit_code is ExitCode.bad_input
    assert words in found.message and hint in found.hint


def test_what_a_dataclass_computes_is_no_argument() -> None:
    def heads(sizes: Heads) -> int:
        return sizes.head

    assert check_arguments(Heads, {}, "model.arguments") == {"width": 64}
    heads.arguments = Heads  # type: ignore[attr-defined]
    assert call_function(heads, {"width": 8}, "f") == 2


def test_a_parameter_without_a_dataclass_is_refused() -> None:
    with pytest.raises(TrainctlError, match="no dataclass declares its parameter shape"):
        arguments_class(lambda shape: shape, "model.factory=f")


def findings(config: RunConfig) -> dict[str, str]:
    found = resolve(config, resolve_hardware(config.hardware)).findings
    return {each.rule: each.message for each in found if each.is_error}


@pytest.mark.parametrize(
    ("changes", "rule", "words"),
    [
        ({"parallelism__sequence": 2}, "TC014", "needs whole sequences"),
        ({"kernels__cross_entropy": "chunked"}, "TC403", "from all its logits"),
        ({"kernels__mlp_tiles": 2}, "TC403", "treat each token by itself"),
        ({"kernels__liger": True}, "TC085", "the model is module"),
        ({"parallelism__expert": 2}, "TC009", "has no experts"),
        ({"model__mup": True, "model__mup_base_width": 32}, "TC016", "not known"),
    ],
)
def test_what_a_module_lacks_is_said_before_a_start(
    changes: dict[str, Any], rule: str, words: str
) -> None:
    config = module_config("bare", **{k: v for k, v in changes.items() if "model" not in k})
    for key, value in changes.items():
        if key.startswith("model__"):
            config.model = from_plain(
                type(config.model), {**to_plain(config.model), key.partition("__")[2]: value}
            )
    assert words in findings(config)[rule]


def test_documents_are_masked_by_modules_that_say_so() -> None:
    assert "TC403" not in findings(module_config("bare", data__mask_documents=True))
    config = module_config("bare", data__mask_documents=True)
    config.model.anatomy = [*config.model.anatomy, "model documents-joined"]
    assert "keeps documents apart" in findings(config)["TC403"]


def test_arguments_are_part_of_the_identity() -> None:
    one, other = (module_config("bare", arguments={"width": 32, "decay": d}) for d in (0.5, 0.25))
    assert one.model.anatomy == other.model.anatomy
    assert model_identity(one.model) != model_identity(other.model)
    assert from_plain(RunConfig, to_plain(one)).model == one.model
