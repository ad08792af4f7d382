"""Model cards: the hub's metadata, training, data, results; and nothing of the machine."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCard
from made_runs import append, new_run, step
from small_checkpoints import save

from trainctl.monitor.card import write_card
from trainctl.runs.records import EventWriter

METRICS = {"loss": 2.125}


def test_a_card_has_the_run_and_no_path_of_the_machine(tmp_path: Path) -> None:
    text = tmp_path / "secret" / "mine.txt"
    text.parent.mkdir()
    text.write_text("some text\n" * 4000)
    run = new_run(
        tmp_path / "run",
        "data=files",
        f"data.paths=[{text}]",
        "training.steps=40",
    )
    append(run, (step(number) for number in range(1, 31)))
    checkpoint = save(run, 30, tokens=122_880, metrics=METRICS)
    row = {"task": "arc_easy", "metric": "acc", "value": 0.25, "stderr": 0.01, "shots": 2}
    with EventWriter(run.events, 1) as writer:
        writer.write("tasks", step=30, results=[row])
        writer.write("tasks", step=20, results=[row | {"task": "other"}])
    write_card(run, checkpoint, tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["trainctl"]
    }  # fmt: skip
    for said in (
        "| checkpoint | step 30, after 123 k tokens |",
        "| batch | 16 sequences",
        "| optimizer | kind=adamw, lr=0.003",
        "| files | mine.txt |",
        "| held-out loss | 2.1250 |",
        "| arc_easy, acc | 0.2500 ± 0.0100 | 2 shots |",
        "| torch | 2.",
        "(loss.png)",
    ):
        assert said in card.content, said
    assert "other" not in card.text and str(tmp_path) not in card.content
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_base_and_its_license_are_metadata(tmp_path: Path) -> None:
    base = tmp_path / "hub" / "models--org--base" / "snapshots" / ("0" * 40)
    base.mkdir(parents=True)
    (base / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# Base\n")
    run = new_run(tmp_path / "run", "training.steps=40", f"model.initial_weights={base}")
    checkpoint = save(run, 30)
    write_card(run, checkpoint, tmp_path, adapter=True)
    found = ModelCard.load(tmp_path / "README.md").data.to_dict()
    assert found["license"] == "apache-2.0" and found["base_model"] == "org/base"
    assert found["base_model_relation"] == "adapter" and found["library_name"] == "peft"
