"""Extras: what pyproject.toml lists is what messages name."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from trainctl.config.extras import DEVELOPMENT, extra_of, install_command
from trainctl.config.registry import SHIPPED, load_specs

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS = {
    name: [*map(Requirement, each)] for name, each in PROJECT["optional-dependencies"].items()
}
FORMER = ("qlora", "tasks")


@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - {*DEVELOPMENT, *FORMER}))
def test_a_package_is_installed_by_the_extra_that_lists_it(extra: str) -> None:
    for wanted in EXTRAS[extra]:
        if wanted.name != "trainctl":
            assert extra_of(wanted.name) == extra, "the environment has another version's metadata"


def test_all_has_every_extra_of_users() -> None:
    def closure(extra: str) -> set[str]:
        (*own,) = (each for each in EXTRAS[extra] if each.name == "trainctl")
        return {extra}.union(*(closure(name) for each in own for name in each.extras))

    assert closure("all") == EXTRAS.keys() - {*DEVELOPMENT, *FORMER}
    assert all(closure(name) & closure("all") for name in FORMER)


def test_the_modules_of_shipped_options_have_an_extra() -> None:
    groups = [path.parent.name for path in SHIPPED.glob("*/__init__.py")]
    found = {module for group in groups for spec in load_specs(group) for module in spec.modules}
    assert {"lm_eval", "pyarrow", "torchao", "wandb"} <= found
    assert [module for module in found if extra_of(module) is None] == []


def test_the_command_names_extras_only_if_they_have_everything() -> None:
    assert install_command("lm_eval", "pyarrow.parquet") == "pip install 'trainctl[data,eval]'"
    assert install_command("mlflow") == "pip install 'trainctl[mlflow]'"
    assert install_command("pandas") == "pip install 'trainctl[notebook]'"
    assert install_command("mup") == "pip install mup"
    assert install_command("accelerate") == "pip install accelerate"  # of `test` only
