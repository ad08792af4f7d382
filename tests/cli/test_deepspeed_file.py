"""`trainctl validate --deepspeed` and `trainctl config import`: what a user sees."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainctl.cli.main import run
from trainctl.rules.deepspeed_schema import load

WRONG = """{
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 2,
  "zero_optimisation": {"stage": 2},
  "gradient_clipping": 1.0,
  "optimizer": {
    "type": "AdamW",
    "params": {"lr": "1e-5"}
  }
}
"""
RIGHT = {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(content):
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "ds.json").write_text(text)
        return "ds.json"

    return write


def test_all_findings_at_once_with_their_lines(written, capsys):
    assert run(["validate", "--deepspeed", written(WRONG), "--world-size", "6"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "error[TC221]: train_batch_size: train_batch_size=64 but micro 4 x accumulation 2 x "
        "data-parallel ranks 6 = 48",
        "  set by: ds.json:2",
        "  hint: nearest legal: 48 (accumulation 2) or 72 (accumulation 3)",
        "error[TC204]: zero_optimisation: DeepSpeed has no key zero_optimisation",
        "  set by: ds.json:5",
        "  hint: did you mean zero_optimization?",
        'error[TC253]: optimizer.params.lr: lr="1e-5" is not a number',
        "  set by: ds.json:9",
        "  hint: write 1e-05, without quotes",
        "more: trainctl explain TC221 TC204 TC253",
        "error: 3 problems in this configuration",
    ]


def test_json(written, capsys):
    assert run(["validate", "--deepspeed", written(WRONG), "--world-size", "6", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["valid"] is False
    assert [each["rule"] for each in report["findings"]] == ["TC221", "TC204", "TC253"]
    assert report["findings"][1]["source"] == "ds.json:5"


def test_a_legal_file(written, capsys):
    file = written(RIGHT)
    assert run(["validate", "--deepspeed", file, "--world-size", "4"]) == 0
    assert capsys.readouterr().out.startswith("ds.json is valid for DeepSpeed ")
    assert run(["validate", "--deepspeed", file]) == 0
    assert "without --world-size" in capsys.readouterr().err


def test_the_hardware_says_how_many_ranks_and_of_what_kind(written, capsys):
    file = written({**RIGHT, "fp16": {"enabled": True}})
    assert run(["validate", "--deepspeed", file, "hardware=4xh100-80g"]) == 0
    assert run(["validate", "--deepspeed", file, "hardware=4xcpu"]) == 2
    assert "TC231" in capsys.readouterr().err
    assert run(["validate", "--deepspeed", file, "hardware=3xh100-80g"]) == 2
    assert "TC221" in capsys.readouterr().err
    assert run(["validate", "--deepspeed", file, "optimizer.lr=1"]) == 2
    assert "no effect on a DeepSpeed JSON" in capsys.readouterr().err


def test_the_model_s_heads(written, tmp_path, capsys):
    shape = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "model").mkdir()
    config = {"model_type": "llama", "num_attention_heads": 4, "intermediate_size": 128, **shape}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    file = written({**RIGHT, "tensor_parallel": {"autotp_size": 8}})
    command = ["validate", "--deepspeed", file, "--world-size", "8", "--model", "model"]
    assert run(command) == 2
    assert "does not divide the model's 4 heads" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", '{"a": }', '{"a": 1'])
def test_no_json(text, written, capsys):
    assert run(["validate", "--deepspeed", written(text)]) == 2
    assert "error[TC200]: not JSON" in capsys.readouterr().err


def test_options_that_go_with_a_file_only(capsys):
    assert run(["validate", "--world-size", "8"]) == 2
    assert "go with --deepspeed" in capsys.readouterr().err
    assert run(["validate", "--deepspeed", "/nowhere.json"]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_import(written, capsys):
    file = written({**RIGHT, "steps_per_print": 10, "dump_state": True})
    assert run(["config", "import", file, "--world-size", "2"]) == 0
    output = capsys.readouterr()
    assert "zero_stage=2" in output.out.splitlines()
    assert "deepspeed.dump_state=true" in output.out.splitlines()
    assert "left out: steps_per_print=10: trainctl reports itself" in output.err
    assert run(["config", "import", file, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["key"] for each in report["left_out"]] == ["steps_per_print"]


def test_the_batch_numbers_of_a_file_say_for_how_many_ranks_it_is(written, capsys):
    batch = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
    file = written({**RIGHT, **batch, "gradient_accumulation_steps": 2})
    assert run(["config", "import", file]) == 0
    assert "training.global_batch_size=64" in capsys.readouterr().out.splitlines()
    assert run(["config", "import", file, "--world-size", "4"]) == 2
    assert "TC221" in capsys.readouterr().err


def test_a_file_with_tensor_ranks_is_for_as_many_as_these(written, capsys):
    file = written({**RIGHT, "tensor_parallel": {"autotp_size": 2}})
    assert run(["config", "import", file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"parallelism.tensor=2", "training.global_batch_size=4"} <= {*lines}


def test_a_key_of_another_program_is_a_warning_and_is_not_imported(written, capsys):
    file = written({**RIGHT, "my_own_tool": {"verbose": True}})
    assert run(["validate", "--deepspeed", file]) == 0
    assert "warning[TC433]: my_own_tool" in capsys.readouterr().err
    assert run(["config", "import", file]) == 0
    output = capsys.readouterr()
    assert "my_own_tool" not in output.out
    assert 'left out: my_own_tool={"verbose": true}: DeepSpeed has no such key' in output.err


def test_an_imported_recipe_composes(written, tmp_path, capsys):
    file = written({**RIGHT, "bf16": {"enabled": True}})
    assert run(["config", "import", file, "--world-size", "2", "--recipe"]) == 0
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text(capsys.readouterr().out)
    assert run(["config", "deepspeed", "mine", "hardware=2xcpu", "training.steps=10"]) == 0
    rendered = json.loads(capsys.readouterr().out)
    assert rendered["train_batch_size"] == 8
    assert rendered["zero_optimization"]["stage"] == 2


def test_a_wrong_file_is_not_imported(written, capsys):
    assert run(["config", "import", written(WRONG)]) == 2
    assert "TC204" in capsys.readouterr().err


KEYS = st.sampled_from(sorted(load().keys))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["auto", "", "cpu", "nvme", "AdamW", "SGD", "WarmupLR", "bf16", "fp16"])
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=3,
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(KEYS, VALUES), max_size=6), st.sampled_from([None, 1, 2, 3, 8]))
def test_any_values_of_the_keys_give_findings_and_no_traceback(pairs, world_size):
    from trainctl.config.json_file import parse_json
    from trainctl.migration.configs.import_values import wanted_values
    from trainctl.rules.deepspeed.case import Case, JsonContext
    from trainctl.rules.resolve import check_json

    document: dict = {}
    for key, value in pairs:
        *parents, name = key.split(".")
        level = document
        for parent in parents:
            if not isinstance(level.get(parent), dict):
                level[parent] = {}
            level = level[parent]
        level[name] = value
    read = parse_json(json.dumps(document), shown="f")
    around = JsonContext(world_size=world_size, fills_auto=True)
    found = check_json(read.value, around)
    assert all(finding.message and finding.key for finding in found)
    if not any(finding.is_error for finding in found):
        wanted_values(Case(read.value, around))
