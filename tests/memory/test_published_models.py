"""Directories of published mixtures of experts: counted as their publishers count them."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from published_cases import CASES, composed, directory, resaved, traced

from trainctl.cli.main import run
from trainctl.config.codec import to_plain
from trainctl.config.compose import compose_leniently
from trainctl.config.schema import ModelConfig
from trainctl.models import tracing
from trainctl.models.anatomy import Role, parse_anatomy
from trainctl.models.tracing import DEFAULTS, IGNORED, published_name, published_table, shape_of
from trainctl.plans.flops import flops_per_token
from trainctl.plans.shapes import count_parameters

# Parameters in all, active ones, and whether the embedding is among the active, as published.
# Exact ones: what the hub counts in the files. Mixtral in arXiv:2401.04088, Qwen3 in
# arXiv:2505.09388 (table 2), gpt-oss in arXiv:2508.10925 (table 1, by its words with the head and
# not the embedding), DeepSeek-V3 in arXiv:2412.19437 ("671B", "37B"): without the module that
# predicts a second token, which transformers' class has not.
SIZES = {
    "deepseek-v3": (671.03e9, 37e9, False),
    "gemma-2-2b": (2_614_341_888, None, True),
    "gemma-2-9b": (9_241_705_984, None, True),
    "gemma-2-27b": (27_227_128_320, None, True),
    "gpt-oss-20b": (20_914_757_184, 3.61e9, False),
    "gpt-oss-120b": (116.83e9, 5.13e9, False),
    "llama-3.1-8b": (8_030_261_248, None, True),
    "llama-3.1-70b": (70_553_706_496, None, True),
    "llama-3.1-405b": (405_853_388_800, None, True),
    "llama-3.2-1b": (1_235_814_400, None, True),
    "llama-3.2-3b": (3_212_749_824, None, True),
    "mixtral-8x7b": (46.70e9, 12.9e9, True),
    "mixtral-8x22b": (140_620_634_112, 39e9, True),
    "olmo-2-7b": (7_298_617_344, None, True),
    "olmo-2-13b": (13_716_198_400, None, True),
    "olmo-2-32b": (32_234_279_936, None, True),
    "phi-4": (14_659_507_200, None, True),
    "qwen2.5-0.5b": (494_032_768, None, True),
    "qwen2.5-1.5b": (1_543_714_304, None, True),
    "qwen2.5-3b": (3_085_938_688, None, True),
    "qwen2.5-7b": (7_615_616_512, None, True),
    "qwen2.5-14b": (14_770_033_664, None, True),
    "qwen2.5-32b": (32_763_876_352, None, True),
    "qwen2.5-72b": (72_706_203_648, None, True),
    "qwen3-30b-a3b": (30.53e9, 3.3e9, True),
    "qwen3-235b-a22b": (235.09e9, 22e9, True),
}


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No model's code is asked, and nothing is kept from before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tracing, "_known", {})
    monkeypatch.setattr(tracing, "_ask_process", lambda *_: pytest.fail("its code was asked"))


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    """Model sections of all directories, composed as commands do, with shipped traces."""
    found = {}
    for name in SIZES:
        folder = directory(name, tmp_path_factory.mktemp(name))
        found_here = compose_leniently(["recipe=tiny", "model=hf", f"model.path={folder}"])
        assert not found_here.has_error, found_here.findings
        found[name] = found_here.config.model
    return found


def section_of(folder: Path, **changes: object) -> dict[str, Any]:
    return to_plain(ModelConfig(family="hf", path=str(folder), **changes))


def test_what_is_shipped_are_the_models_of_the_test_and_a_few_kilobytes() -> None:
    assert set(published_table()["models"]) == set(CASES) == set(SIZES)
    assert len(json.dumps(published_table())) < 64_000


QUICK = ("qwen2.5-0.5b", "gpt-oss-20b")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_what_is_shipped_is_what_the_code_of_the_model_says(name: str) -> None:
    shipped, config = published_table()["models"][name], composed(name)
    assert shipped["anatomy"] == config.model.anatomy
    assert shipped["attention"] == config.model.attention.value
    assert shipped["shapes"] == [shape_of(CASES[name]), shape_of(resaved(name))]
    length = 3072  # not one that the file was made with
    for part, size in asdict(traced(config, length).block).items():
        fixed, by_length = shipped["block"][part]
        assert fixed + by_length * length == pytest.approx(size, rel=0.001), part


def test_values_that_are_not_compared_are_what_leaving_them_out_means(tmp_path: Path) -> None:
    from transformers import AutoConfig

    def settings(**changes: object) -> dict[str, object]:
        return AutoConfig.from_pretrained(directory(name, tmp_path, **changes)).to_dict()

    for name in ("llama-3.1-8b", "qwen2.5-7b", "gemma-2-9b", "phi-4", "olmo-2-7b", "mixtral-8x7b"):
        usual = settings()
        for key, value in DEFAULTS.items():
            assert key not in usual or usual[key] == settings(**{key: value})[key], (name, key)


@pytest.mark.usefixtures("without_processes")
def test_a_fine_tuned_or_resaved_directory_is_the_model_and_a_changed_one_is_not(
    tmp_path: Path,
) -> None:
    name = "qwen2.5-7b"
    assert published_name(section_of(directory(name, tmp_path)), "") == name
    tuned = {"eos_token_id": 151645, "torch_dtype": "bfloat16", "max_position_embeddings": 32768}
    assert tuned.keys() <= IGNORED
    tuned_here = directory(name, tmp_path, **tuned, use_cache=False, attention_dropout=0.0)
    assert published_name(section_of(tuned_here), "") == name
    (tmp_path / "config.json").write_text(json.dumps(resaved(name)))
    assert published_name(section_of(tmp_path), "") == name
    for change in (
        {"num_hidden_layers": 27},
        {"tie_word_embeddings": True},
        {"attention_dropout": 0.1},
        {"use_sliding_window": True},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"layer_types": ["sliding_attention"] * 28},
        {"a_key_that_nobody_knows": 1},
    ):
        assert published_name(section_of(directory(name, tmp_path, **change)), "") is None, change
    same = directory(name, tmp_path)
    assert published_name(section_of(same, trust_remote_code=True), "") is None
    assert published_name(section_of(same), "5.17.0") is None
    (tmp_path / "config.json").write_text("[]")
    assert published_name(section_of(same), "") is None


@pytest.mark.usefixtures("without_processes")
def test_a_published_model_is_budgeted_without_a_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = directory("deepseek-v3", tmp_path / "DeepSeek-V3")
    words = ["estimate-memory", "recipe=7b-zero3", "model=hf", f"model.path={folder}"]
    words += ["tokenizer=byte", "model.weights=random", "hardware=64x8xh200-141g"]
    assert run([*words, "training.global_batch_size=2048"]) in (0, 3)
    first = capsys.readouterr().out.splitlines()[0]
    assert re.match(
        r"DeepSeek-V3 \(671 B parameters\) on 64x8xh200-141g, .*: ZeRO 3, data 512", first
    )


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_those_that_were_published(name: str, read: dict[str, ModelConfig]) -> None:
    total, active, with_embedding = SIZES[name]
    model = read[name]
    anatomy = parse_anatomy(model.anatomy)
    near = total if isinstance(total, int) else pytest.approx(total, rel=1e-4)
    assert anatomy.total == count_parameters(model).total == near
    embedding = 0 if with_embedding else anatomy.numel(Role.embedding)
    assert anatomy.active - embedding == pytest.approx(active or total, rel=0.02)
    settings = CASES[name]
    assert (anatomy.blocks[-1].experts_per_token or None) == settings.get("num_experts_per_tok")
    assert len(anatomy.blocks) == settings["num_hidden_layers"] == model.num_layers
    assert len(model.anatomy) < 30  # lines of a configuration


def test_latent_and_sliding_attention_are_counted_as_they_multiply(read: dict) -> None:
    deepseek = parse_anatomy(read["deepseek-v3"].anatomy)
    # Scores of 128 + 64 elements a head, values of 128 (arXiv:2412.19437, section 4.2).
    assert deepseek.attention_products(4096) == 61 * 128 * (192 + 128) * 4096
    assert [block.experts for block in deepseek.blocks[:4]] == [0, 0, 0, 256]
    flops = 6 * (deepseek.multiplied + deepseek.attention_products(4096))
    assert flops_per_token(read["deepseek-v3"], 4096) == flops
    gpt_oss = parse_anatomy(read["gpt-oss-120b"].anatomy)
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
    """The model has one block less than the shipped trace, so it is traced by a process, then
    cached.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = directory("deepseek-v3", tmp_path / "deepseek", num_hidden_layers=60)
    words = ["estimate-memory", "recipe=7b-zero3", "model=hf", f"model.path={folder}", "--json"]
    words += ["tokenizer=byte", "model.weights=random", "hardware=8xh100-80g", "--force"]
    run(words[:-1])
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    # A master copy and two moments of each parameter.
    assert found["checkpoint_bytes"] == pytest.approx(12 * (671.03e9 - 11.51e9), rel=0.001)
    monkeypatch.setattr("trainctl.models.tracing._known", {})
    monkeypatch.setattr("trainctl.models.tracing._ask_process", lambda *_: pytest.fail("again"))
    run(words[:-1])
    assert json.loads(capsys.readouterr().out) == found
