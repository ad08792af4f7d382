"""Tests of what a run takes from a transformers directory: weights, experts, precedence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from anatomies import SMALL
from small_model import SHAPE

from trainctl.config.compose import ComposedConfig, compose, compose_leniently
from trainctl.errors import TrainctlError
from trainctl.models.directory import fetch_weights
from trainctl.plans.settings import auxiliary_loss

pytestmark = pytest.mark.usefixtures("nothing_is_traced")


SPARSE = [*SMALL[:-1], SMALL[-1].replace("attention", "experts=8/2 attention")]


def directory(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    content = json.dumps({"model_type": kind, **SHAPE, **changes})
    (folder / "config.json").write_text(content)
    return folder


def composed(folder: Path, *overrides: str) -> ComposedConfig:
    return compose(["model=hf", f"model.path={folder}", *overrides])


def test_a_directory_with_weights_starts_from_them(tmp_path: Path) -> None:
    folder = directory(tmp_path / "a")
    assert composed(folder).config.model.initial_weights is None
    (folder / "model.safetensors").write_bytes(b"")
    assert composed(folder).config.model.initial_weights == str(folder)
    assert composed(folder, "model.weights=random").config.model.initial_weights is None
    other = composed(folder, "model.initial_weights=elsewhere")
    assert other.config.model.initial_weights == "elsewhere"
    assert other.findings == ()
    source = composed(folder).source_of("model.initial_weights")
    assert source == f"{folder}/config.json"


@pytest.mark.parametrize(
    ("file", "override", "words"),
    [
        ("pytorch_model.bin", "", "pickled form"),
        ("", "model.weights=pretrained", "has no weights"),
    ],
)
def test_weights_that_cannot_be_read_are_no_reason_for_random_ones(
    tmp_path: Path, file: str, override: str, words: str
) -> None:
    folder = directory(tmp_path / "a")
    if file:
        (folder / file).write_bytes(b"")
    with pytest.raises(TrainctlError) as caught:
        composed(folder, *([override] if override else []))
    (found,) = caught.value.findings
    assert (found.rule, found.key) == ("TC145", "model.weights")
    assert words in found.message
    assert "model.weights=random" in found.hint
    assert composed(folder, "model.weights=random").config.model.initial_weights is None


def test_a_recipes_shape_gives_way_to_the_directory(tmp_path: Path) -> None:
    folder = directory(tmp_path / "a")
    # The recipe chooses a model of 512 tokens.
    found = compose(["recipe=tiny", "model=hf", f"model.path={folder}"])
    assert found.config.model.vocab_size == 320
    assert found.findings == ()
    own = tmp_path / "own" / "recipes"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [base, override /model: hf, _self_]\n"
        "model:\n  vocab_size: 999\n"
    )
    overrides = ["recipe=mine", f"model.path={folder}"]
    found = compose(overrides, config_dir=tmp_path / "own")
    assert found.config.model.vocab_size == 320
    (warning,) = found.findings
    assert "999 gives way to 320" in warning.message
    typed = compose([*overrides, "model.vocab_size=400"], config_dir=tmp_path / "own")
    assert typed.config.model.vocab_size == 400


def test_a_shape_that_transformers_would_not_read_is_refused(tmp_path: Path) -> None:
    folder = directory(tmp_path / "a", "qwen2")
    with pytest.raises(TrainctlError) as caught:
        composed(folder, "model.num_layers=1")
    (found,) = caught.value.findings
    assert (found.rule, found.key) == ("TC146", "model.num_layers")
    assert composed(folder, "model.initializer_range=0.01").config.model.initializer_range == 0.01


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
        ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2}),
        ("deepseek_v3", {"n_routed_experts": 8, "num_experts_per_tok": 2}),
    ],
)
def test_experts_are_read_and_what_their_routers_are_to_learn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, keys: dict[str, int]
) -> None:
    """The directory's balancing loss weight counts only if `output_router_logits` is set, as in
    transformers.
    """
    monkeypatch.setattr("trainctl.config.compose.anatomy_in_child", lambda config: SPARSE)
    folder = directory(tmp_path / "a", kind, router_aux_loss_coef=0.02, **keys)
    model = composed(folder).config.model
    assert (model.family, model.num_experts, model.experts_per_token) == ("hf", 8, 2)
    assert model.router_aux_loss_coef is None
    switched = {**keys, "output_router_logits": True, "router_aux_loss_coef": 0.02}
    asking = composed(directory(tmp_path / "b", kind, **switched)).config
    assert asking.model.router_aux_loss_coef == 0.02 == auxiliary_loss(asking)
    asking.experts.auxiliary_loss = 0.0
    assert auxiliary_loss(asking) == 0.0


def test_experts_are_those_that_the_code_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A `config.json` may leave out a default, use other names, say that there are no experts, or
    have unused expert keys.
    """
    for name, table, keys in (
        ("a", SPARSE, {}),
        ("b", SPARSE, {"num_local_experts": 8, "moe_k": 2}),
        ("c", SMALL, {"num_local_experts": 0, "num_experts_per_tok": 0}),
        ("d", SMALL, {"num_experts": 16384, "num_experts_per_tok": 64}),
    ):
        monkeypatch.setattr("trainctl.config.compose.anatomy_in_child", lambda config, t=table: t)
        model = composed(directory(tmp_path / name, "mixtral", **keys)).config.model
        expected = (8, 2) if table is SPARSE else (None, None)
        assert (model.num_experts, model.experts_per_token) == expected, name


def test_a_name_on_the_hub_says_what_to_do_without_a_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise OSError("Name or service not known")

    fake = SimpleNamespace(snapshot_download=refuse)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    found = compose_leniently(["model=hf", "model.path=some-lab/A-Model-1B", "training.steps=1"])
    (error,) = found.findings
    assert "some-lab/A-Model-1B is no directory here" in error.message
    assert "hf download some-lab/A-Model-1B --local-dir DIR" in error.hint
    assert error.source == "model.path=some-lab/A-Model-1B"


def test_a_name_on_the_hub_becomes_its_folder_and_weights_come_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--some-lab--A-Model-1B" / "snapshots" / ("ab" * 20)
    snapshot.parent.mkdir(parents=True)
    calls = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((name, revision, "*.safetensors" in allow_patterns))
        directory(snapshot)
        if "*.safetensors" in allow_patterns:
            (snapshot / "model.safetensors").write_bytes(b"")
        return str(snapshot)

    fake = SimpleNamespace(snapshot_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    model = composed(Path("some-lab/A-Model-1B")).config.model
    assert (model.name, model.path, model.initial_weights) == (
        "A-Model-1B",
        str(snapshot),
        str(snapshot),
    )
    assert calls == [("some-lab/A-Model-1B", None, False)]
    fetch_weights(str(snapshot))
    fetch_weights(str(snapshot))
    assert calls[1:] == [("some-lab/A-Model-1B", "ab" * 20, True)]
