"""lm-eval writes questions by the chat template with the arguments that the run gave it."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_files import UNMARKED, write_tokenizer
from test_new_tokens import write_base

from trainctl.errors import TrainctlError
from trainctl.train.tasks import TaskRequest, evaluate_tasks, manager_of

TASK = """task: say
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 2, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.slow
def test_the_template_is_given_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    write_base(tmp_path / "model")
    needing = "{{ raise_exception('not brief') if not brief }}" + UNMARKED
    write_tokenizer(tmp_path / "model", needing)
    file = tmp_path / "say.jsonl"
    file.write_text('{"question": "a", "answer": "b"}\n' * 3)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "say.yaml").write_text(TASK.format(file=file))

    def found(**arguments: bool) -> int:
        asked = TaskRequest(
            ["say"], tmp_path / "tasks", batch_size=2, chat=True, template_arguments=arguments
        )
        return evaluate_tasks(
            tmp_path / "model",
            manager_of(asked),
            asked,
            device="cpu",
            dtype="float32",
            progress=lambda *_: None,
        )["results"][0]["samples"]

    assert found(brief=True) == 3
    with pytest.raises(TrainctlError, match="not brief"):
        found()
