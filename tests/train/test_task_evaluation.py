"""Tasks of lm-eval during training: against lm-eval's own model on exports of the same steps."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_files import write_tokenizer
from expert_cases import mixture
from fork_server import RanksFailed
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, with_stop

from trainctl.config.registry import new_section
from trainctl.config.schema import Accelerator, RunConfig
from trainctl.hardware import Hardware
from trainctl.rules.resolve import resolve
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.callbacks.task_evaluation import undisturbed_random
from trainctl.train.export.directory import export
from trainctl.train.tasks import TaskRequest, manager_of, rows_of_tasks

LENGTH, STEPS = 32, 4
COMMON = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
output_type: {kind}
"""
KINDS = {
    "pick": (
        "multiple_choice",
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: label\n'
        "metric_list: [{metric: acc}, {metric: acc_norm}]\n",
    ),
    "read": (
        "loglikelihood_rolling",
        'doc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]\n",
    ),
    "say": (
        "generate_until",
        'doc_to_text: "{{question}}"\ndoc_to_target: "{{text}}"\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 2, do_sample: false}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n",
    ),
    "long": (
        "multiple_choice",
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{[text, text * 99]}}"\ndoc_to_target: 0\n'
        "metric_list: [{metric: acc}]\n",
    ),
    "broken": (
        "multiple_choice",
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{1 / 0}}"\n'
        "metric_list: [{metric: acc}]\n",
    ),
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of tasks with their data: answers of one and of several tokens, long texts."""
    folder = tmp_path_factory.mktemp("tasks")
    words = ("def", "return", "class x", "import os", "self.value = 1", "for i in range")
    rows = [
        {
            "question": f"{words[i % 6]} {i}" + " and so on" * (i % 5),
            "choices": ["a", "b", f" {words[(i + 1) % 6]}", "\n"],
            "label": i % 4,
            "text": f"{words[i % 6]} = {words[(i + 2) % 6]}\n" * (1 + i % 4),
        }
        for i in range(11)
    ]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, (kind, rest) in KINDS.items():
        text = COMMON.format(name=name, file=file, kind=kind) + rest
        (folder / f"{name}.yaml").write_text(text)
    write_tokenizer(folder / "tokenizer")
    return folder


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))


def config_of(tasks: Path, keys: dict[str, Any] | None, **changes: Any) -> RunConfig:
    defaults = {"steps": STEPS, "evaluation_samples": 0, "sequence_length": LENGTH}
    config = tiny_config(**{**defaults, "checkpoint__every_steps": 2, **changes})
    config.tokenizer = new_section(
        "tokenizer", "file", path=str(tasks / "tokenizer" / "tokenizer.json")
    )
    if keys is not None:
        config.callbacks["task_evaluation"] = {"include_path": str(tasks), **keys}
    return config


def recorded(run: RunPaths) -> list[tuple[int, str, dict[str, Any]]]:
    found = [event for event in read_events(run.events) if event["event"] == "callback"]
    return [(each["step"], each["name"], each["values"]) for each in found]


def by_harness(
    config: RunConfig, run: RunPaths, step: int, asked: TaskRequest, *, length: int = LENGTH
) -> dict[str, dict[str, Any]]:
    """Return the metrics of lm-eval's own model on the export of a step."""
    from lm_eval.models.huggingface import HFLM

    out = run.root / f"export-{step}"
    export(config, run.checkpoints / f"step-{step:08}", out, dtype=torch.float32)
    model = HFLM(pretrained=str(out), device="cpu", dtype="float32", max_length=length)
    found: dict[str, dict[str, Any]] = {}
    for row in rows_of_tasks(model, manager_of(asked), asked):
        found.setdefault(row["task"], {"samples": row["samples"]})[row["metric"]] = row["value"]
    return found


LAYOUTS = {
    "zero0": {},
    "zero3": {"zero_stage__stage": 3},
    "fsdp2": {"zero_stage__stage": 3, "engine__kind": "fsdp2", "kernels__cross_entropy": "chunked"},
    "tensor": {"parallelism__tensor": 2},
    "expert": {"parallelism__expert": 2},
    "compiled": {"kernels__compile": "blocks"},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_match_lm_eval_and_the_curve_is_undisturbed(
    tmp_path: Path, tasks: Path, layout: str
) -> None:
    keys = {"tasks": ["pick", "read"], "batch_size": 3}
    config, without = (config_of(tasks, each, **LAYOUTS[layout]) for each in (keys, None))
    if layout == "expert":
        config.model = without.model = mixture(tmp_path / "model", "qwen3_moe")
    run, plain = RunPaths(tmp_path / "run"), RunPaths(tmp_path / "plain")
    train_cases(2, [Case(tiny_plan(config, 2), run)])
    train_cases(2, [Case(tiny_plan(without, 2), plain)])
    assert curve(run) == curve(plain)
    found = recorded(run)
    assert [each[:2] for each in found] == [(s, n) for s in (2, 4) for n in ("pick", "read")]
    for step in (2, 4):
        values = {name: values for at, name, values in found if at == step}
        expected = by_harness(config, run, step, TaskRequest(["pick", "read"], tasks))
        assert values["pick"] == expected["pick"]
        assert values["read"] == pytest.approx(expected["read"], rel=1e-5)


@pytest.mark.slow
def test_questions_go_through_the_chat_template_after_examples(tmp_path: Path, tasks: Path) -> None:
    keys = {"tasks": ["pick"], "chat": True, "shots": 1, "samples": 6}
    config = config_of(tasks, keys, sequence_length=128)
    run = RunPaths(tmp_path / "run")
    train_cases(1, [Case(tiny_plan(config, 1), run)])
    for step, name, values in recorded(run):
        asked = TaskRequest(["pick"], tasks, shots=1, limit=6, chat=True)
        assert values == by_harness(config, run, step, asked, length=128)[name]


@pytest.mark.slow
def test_a_resume_neither_repeats_nor_loses_an_evaluation(tmp_path: Path, tasks: Path) -> None:
    """The first attempt ends at a checkpoint, after which it is as if it was killed."""
    keys = {"tasks": ["pick"], "every_steps": 1, "samples": 5}
    plan = tiny_plan(config_of(tasks, keys, zero_stage__stage=1), 2)
    whole, parts = RunPaths(tmp_path / "whole"), RunPaths(tmp_path / "parts")
    train_cases(2, [Case(plan, whole)])
    train_cases(2, [Case(with_stop(plan, 2), parts)])
    train_cases(2, [Case(plan, parts, attempt=2)])
    assert [step for step, *_ in recorded(whole)] == [1, 2, 3, 4]
    assert recorded(parts) == recorded(whole) and curve(parts) == curve(whole)
    assert recorded(whole)[0][2]["samples"] == 5


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tasks": ["long"]}, r"task_evaluation failed on long at step 2: an answer of [\d,]+ tok"),
        ({"tasks": ["broken"]}, "at step 0: ZeroDivisionError"),
        ({"tasks": ["say"]}, "at step 0: say generates text, which takes a forward pass"),
    ],
)
def test_a_fault_of_a_task_is_named(
    tmp_path: Path, tasks: Path, keys: dict[str, Any], message: str
) -> None:
    run = RunPaths(tmp_path / "run")
    with pytest.raises(RanksFailed, match=message):
        train_cases(2, [Case(tiny_plan(config_of(tasks, keys), 2), run)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallelism__pipeline": 2}, "needs the whole model in one call"),
        ({"kernels__compile": "deepcompile"}, "calls the model without labels"),
        (
            {"checkpoint__every_steps": None, "checkpoint__at_end": False},
            "evaluates at checkpoints, and the run saves none",
        ),
    ],
)
def test_what_it_cannot_do_is_an_error_of_the_plan(
    tasks: Path, changes: dict[str, Any], message: str
) -> None:
    config = config_of(tasks, {"tasks": ["pick"]}, **changes)
    found = resolve(
        config, Hardware(name="cpu", accelerator=Accelerator.cpu, nodes=1, devices_per_node=2)
    ).findings
    assert any(message in each.message for each in found if each.rule == "TC412")


def test_random_states_are_restored() -> None:
    def drawn() -> tuple[float, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = drawn()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with undisturbed_random(torch.device("cpu")):
        random.seed(2), np.random.seed(2), torch.manual_seed(2)
    assert drawn() == expected


@pytest.mark.slow
@pytest.mark.usefixtures("own_options")
def test_a_stop_within_it_leaves_no_record_and_the_resume_evaluates(
    tasks: Path, tmp_path: Path
) -> None:
    config = config_of(tasks, {"tasks": ["pick"]})
    config.callbacks["striking"] = {"blow": "stop", "at_pass": 1}
    run = RunPaths(tmp_path / "run")
    train_cases(2, [Case(tiny_plan(config, 2), run)])
    assert not [name for _, name, _ in recorded(run) if name == "pick"]
    config.callbacks["striking"] = {}
    train_cases(2, [Case(tiny_plan(config, 2), run, attempt=2)])
    assert [step for step, name, _ in recorded(run) if name == "pick"] == [2, STEPS]
