"""Directories of published mixtures of experts: counted as their publishers count them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from trainctl.cli.main import run
from trainctl.config.anatomy import Role, anatomy_of
from trainctl.config.compose import examine
from trainctl.plan.flops import flops_per_token
from trainctl.plan.shapes import count_parameters

PUBLISHED = Path(__file__).parent / "published"

# Parameters in all, active ones, and whether the embedding is among the active, as published:
# Mixtral in arXiv:2401.04088, Qwen3 in arXiv:2505.09388 (table 2), gpt-oss in arXiv:2508.10925
# (table 1, by its words with the unembedding and not the embedding), DeepSeek-V3 in
# arXiv:2412.19437 ("671B", "37B"): without the module that predicts a second token, which
# transformers' class has not.
SIZES = {
    "mixtral-8x7b": (46.70e9, 12.9e9, True),
    "qwen3-30b-a3b": (30.53e9, 3.3e9, True),
    "qwen3-235b-a22b": (235.09e9, 22e9, True),
    "gpt-oss-120b": (116.83e9, 5.13e9, False),
    "deepseek-v3": (671.03e9, 37e9, False),
}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Each directory, composed as a command composes it."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        from trainctl.train.anatomy import anatomy

        patch.setattr(
            "trainctl.config.compose.anatomy_in_child",
            lambda config: anatomy(config.model).to_table(),
        )
        for name in SIZES:
            folder = tmp_path_factory.mktemp(name)
            shutil.copy(PUBLISHED / f"{name}.json", folder / "config.json")
            composed = examine(["recipe=tiny", "model=hf", f"model.path={folder}"])
            assert not composed.has_error, composed.findings
            found[name] = composed.config.model
    return found


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_those_that_were_published(name: str, read: dict) -> None:
    total, active, with_embedding = SIZES[name]
    model = read[name]
    anatomy = anatomy_of(model.anatomy)
    assert anatomy.total == count_parameters(model).total == pytest.approx(total, rel=1e-4)
    embedding = 0 if with_embedding else anatomy.numel(Role.embedding)
    assert anatomy.active - embedding == pytest.approx(active, rel=0.02)
    settings = json.loads((PUBLISHED / f"{name}.json").read_text())
    assert anatomy.blocks[-1].experts_per_token == settings["num_experts_per_tok"]
    assert len(anatomy.blocks) == settings["num_hidden_layers"] == model.num_layers
    assert len(model.anatomy) < 30  # lines of a configuration


def test_latent_and_sliding_attention_are_counted_as_they_multiply(read: dict) -> None:
    deepseek = anatomy_of(read["deepseek-v3"].anatomy)
    # Scores of 128 + 64 elements a head, values of 128 (arXiv:2412.19437, section 4.2).
    assert deepseek.attention_products(4096) == 61 * 128 * (192 + 128) * 4096
    assert [block.experts for block in deepseek.blocks[:4]] == [0, 0, 0, 256]
    flops = 6 * (deepseek.multiplied + deepseek.attention_products(4096))
    assert flops_per_token(read["deepseek-v3"], 4096) == flops
    gpt_oss = anatomy_of(read["gpt-oss-120b"].anatomy)
    # Every other block sees 128 tokens (arXiv:2508.10925, section 2.3).
    assert gpt_oss.attention_products(4096) == 18 * 64 * 128 * (4096 + 128)
    assert gpt_oss.buffers == ()
    assert {buffer.name.rpartition(".")[2] for buffer in deepseek.buffers} == {
        "e_score_correction_bias"
    }


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
def test_a_published_directory_is_planned_by_the_real_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest: its processes, trace and budget; a second time from what was kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "deepseek"
    folder.mkdir()
    shutil.copy(PUBLISHED / "deepseek-v3.json", folder / "config.json")
    words = ["estimate-memory", "recipe=7b-zero3", "model=hf", f"model.path={folder}", "--json"]
    words += ["tokenizer=byte", "model.weights=random", "hardware=8xh100-80g", "--force"]
    run(words[:-1])
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    # A master copy and two moments of each parameter.
    assert found["checkpoint_bytes"] == pytest.approx(12 * 671.03e9, rel=0.001)
    monkeypatch.setattr("trainctl.config.tracing._known", {})
    monkeypatch.setattr("trainctl.config.tracing._ask_process", lambda *_: pytest.fail("again"))
    run(words[:-1])
    assert json.loads(capsys.readouterr().out) == found
