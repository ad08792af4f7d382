"""An exported directory is the trained model: transformers loads it and computes the same."""

import json
import os
import pickle
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fabricated import fabricate
from held_out import evaluate
from rank_processes import Case, tiny_config, tiny_plan, train_cases
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainctl.config.codec import to_plain
from trainctl.config.registry import new_section
from trainctl.config.schema import (
    AttentionKind,
    DataType,
)
from trainctl.data.corpus import Corpus
from trainctl.data.tokenizer import load_tokenizer
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.checkpoints import newest_checkpoint
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.data import PackedDataset
from trainctl.train.evaluation import inference
from trainctl.train.export.directory import export
from trainctl.train.models.loaded import LoadedModel, load

STEPS = 3


def plan(stage, compute=DataType.fp32, ranks=2, **model):
    config = tiny_config(
        steps=STEPS,
        sequence_length=64,
        global_batch_size=4,
        gradient_accumulation_steps=2 // ranks,
    )
    config.zero_stage.stage = stage
    config.precision.compute = compute
    config.optimizer.lr = 1e-3
    for name, value in model.items():
        setattr(config.model, name, value)
    return tiny_plan(config, ranks)


def held_out_loss(score, case):
    corpus = Corpus.load(case.run.corpus)
    length = case.plan.batch.sequence_length
    dataset = PackedDataset(corpus, corpus.held_out, sequence_length=length, mask_documents=False)
    number = case.plan.config.training.evaluation_samples
    return evaluate(score, dataset, num_samples=number, micro_batch_size=2)


def check(case, out, dtype=torch.float32, shard_bytes=5 * 10**9):
    """Export the newest checkpoint and hold transformers' model against ours and the engine's."""
    newest, _ = newest_checkpoint(case.run)
    assert newest is not None and newest.step == STEPS
    exported = export(case.plan.config, newest.path, out, dtype=dtype, shard_bytes=shard_bytes)
    theirs = LoadedModel(
        AutoModelForCausalLM.from_pretrained(out, dtype=dtype), torch.device("cpu")
    )
    ours = load(case.plan, newest.path, "cpu", lambda *_: None)
    assert exported.num_parameters == sum(p.numel() for p in ours.model.parameters())
    assert type(theirs.model) is type(ours.model)
    ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    with inference(theirs.model), inference(ours.model):
        torch.testing.assert_close(
            theirs.model(ids).logits, ours.model(ids).logits, rtol=1e-6, atol=1e-6
        )
        recorded = [e for e in read_events(case.run.events) if e["event"] == "evaluation"][-1]
        for loaded in (theirs, ours):
            assert held_out_loss(loaded.score, case) == pytest.approx(recorded["loss"], abs=1e-6)
    return exported


@pytest.mark.slow
def test_the_export_of_every_zero_stage_computes_what_the_engine_did(tmp_path):
    cases = [Case(plan(stage), RunPaths(tmp_path / f"{stage}")) for stage in range(4)]
    train_cases(2, cases, together=True)
    for stage, case in enumerate(cases):
        exported = check(case, tmp_path / f"out-{stage}", shard_bytes=100_000)
        assert len([name for name in exported.files if name.endswith(".safetensors")]) > 2


@pytest.mark.slow
def test_every_family_tied_and_untied_in_fp32_and_bf16(tmp_path):
    gpt2 = {"family": "gpt2", "num_key_value_heads": None}
    qwen3 = {"family": "qwen3", "head_dim": 32}
    mistral = {"family": "mistral", "sliding_window": 64}
    alone = partial(plan, ranks=1)  # on several ranks: the test above
    plans = [
        alone(0, **gpt2, tie_word_embeddings=True),
        alone(1, **gpt2, tie_word_embeddings=False),
        alone(2, **qwen3, tie_word_embeddings=True),
        alone(1, **qwen3, tie_word_embeddings=False),
        alone(0, **mistral, tie_word_embeddings=False),
        alone(2, DataType.bf16, **mistral, tie_word_embeddings=True),
        alone(3, tie_word_embeddings=False),
    ]
    cases = [Case(item, RunPaths(tmp_path / f"{number}")) for number, item in enumerate(plans)]
    train_cases(1, cases, together=True)
    for number, case in enumerate(cases):
        out, model = tmp_path / f"out-{number}", case.plan.config.model
        compute = case.plan.config.precision.compute
        dtype = torch.bfloat16 if compute == DataType.bf16 else torch.float32
        exported = check(case, out, dtype)
        assert exported.files == ["config.json", "model.safetensors"]
        with safe_open(out / "model.safetensors", framework="pt") as file:
            names = set(file.keys())
            assert all(file.get_tensor(name).dtype == dtype for name in names)
        assert ("lm_head.weight" in names) != model.tie_word_embeddings
        settings = json.loads((out / "config.json").read_text())
        assert settings["dtype"] == str(dtype).removeprefix("torch.")
        assert settings["use_cache"] is True and settings["eos_token_id"] == 256


@pytest.mark.slow
def test_memory_stays_far_below_the_model(tmp_path):
    config = tiny_config()
    config.model.hidden_size, config.model.intermediate_size = 1024, 2816
    config.model.num_attention_heads = config.model.num_key_value_heads = 8
    config.model.num_layers = 8  # 415 MB in fp32
    checkpoint = fabricate(RunPaths(tmp_path / "run"), config.model)
    shard = 40_000_000
    parameter = config.model.hidden_size * config.model.intermediate_size * 4
    found = grown(
        to_plain(config), checkpoint, tmp_path / "out", "trainctl.train.export.directory:export",
        {"dtype": torch.bfloat16, "shard_bytes": shard},
    )  # fmt: skip
    assert found["bytes"] > 5 * shard and len(found["files"]) > 6, "too small a model to tell"
    assert found["growth"] < 2 * shard + parameter
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.bfloat16 and theirs.num_parameters() * 2 == found["bytes"]
    found = grown(
        to_plain(config), checkpoint, tmp_path / "out.gguf",
        "trainctl.train.export.gguf_file:export_gguf", {"dtype": "q8_0"},
    )  # fmt: skip
    # About half of it are imports; four tensors are in memory at most.
    assert found["bytes"] > 8 * parameter and found["growth"] < 12 * parameter, found


def grown(*work):
    """Export in a process of its own; return the growth of its memory, and the files."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "support" / "export_probe.py")],
        input=pickle.dumps(work),
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def small(tmp_path):
    """Return a tiny configuration and a checkpoint of its model."""
    config = tiny_config()
    return config, fabricate(RunPaths(tmp_path / "run"), config.model)


def test_a_run_with_flash_attention_is_exported_and_loaded_where_there_is_none(tmp_path):
    made = plan(0)
    checkpoint = fabricate(RunPaths(tmp_path / "run"), made.config.model)
    made.config.model.attention = AttentionKind.flash_attention_2  # as if planned for a GPU
    export(made.config, checkpoint, tmp_path / "out", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours = load(made, checkpoint, "cpu", lambda *_: None).model.eval()
    ids = torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids).logits)


def test_a_functions_model_without_token_ids_is_exported(tmp_path, monkeypatch):
    """The bare `PretrainedConfig` has none of the usual keys of a model."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "bare_model.py").write_text(
        "from torch import nn\n"
        "from transformers import PretrainedConfig, PreTrainedModel\n"
        "class Bare(PreTrainedModel):\n"
        "    config_class = PretrainedConfig\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        self.embed, self.out = nn.Embedding(300, 8), nn.Linear(8, 300)\n"
        "        self.post_init()\n"
        "def make(shape):\n"
        "    return Bare(PretrainedConfig())\n"
    )
    config = tiny_config()
    config.model.factory = "bare_model:make"
    checkpoint = fabricate(RunPaths(tmp_path / "run"), config.model)
    export(config, checkpoint, tmp_path / "out", dtype=torch.float32)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["Bare"] and written["eos_token_id"] == 256


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path, small):
    config, checkpoint = small
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("precious")
    with pytest.raises(TrainctlError, match="not an empty folder"):
        export(config, checkpoint, out, dtype=torch.float32)
    assert [path.name for path in out.iterdir()] == ["mine"]
    (out / "mine").unlink()
    export(config, checkpoint, out, dtype=torch.float32)
    assert (out / "model.safetensors").is_file()


def test_an_export_that_fails_leaves_nothing_and_one_that_was_killed_is_cleared(tmp_path, small):
    config, checkpoint = small
    folder = tmp_path / "exports"
    (folder / ".out.999999999.tmp").mkdir(parents=True)  # no process has this pid
    (folder / f".out.{os.getpid()}.tmp.kept").mkdir()

    def stop(done, total):
        assert 0 < done <= total
        assert not (folder / "out").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(config, checkpoint, folder / "out", dtype=torch.float32, progress=stop)
    assert [path.name for path in folder.iterdir()] == [f".out.{os.getpid()}.tmp.kept"]


def test_too_small_a_disk_is_found_before_anything_is_written(tmp_path, small, monkeypatch):
    config, checkpoint = small
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(TrainctlError, match=r" 1\.0 kB free") as caught:
        export(config, checkpoint, tmp_path / "out", dtype=torch.float32)
    assert caught.value.exit_code == ExitCode.environment
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_write_that_fails_leaves_nothing(tmp_path, small):
    """The kernel itself fails the write: RLIMIT_FSIZE bounds the size of every file."""
    config, checkpoint = small
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(TrainctlError, match=r"cannot export .* File too large") as caught:
            export(config, checkpoint, tmp_path / "out", dtype=torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.exit_code == ExitCode.environment and "free space" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_another_model_is_refused(tmp_path, small):
    config, checkpoint = small
    config.model.hidden_size = 128
    with pytest.raises(TrainctlError, match="hidden_size was 64, and is 128") as caught:
        export(config, checkpoint, tmp_path / "out", dtype=torch.float32)
    assert caught.value.exit_code == ExitCode.run_state
    assert not (tmp_path / "out").exists()


def test_the_tokenizer_goes_along(tmp_path, small):
    config, checkpoint = small
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=["<unk>", "</s>"])
    backend.train_from_iterator(["the cat sat on the mat and the cat sat"], trainer)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    for kind, path in (("file", folder / "tokenizer.json"), ("hf", folder)):
        config.tokenizer = new_section("tokenizer", kind, path=str(path))
        out = tmp_path / f"out-{kind}"
        exported = export(config, checkpoint, out, dtype=torch.float32)
        assert exported.notes == []
        ours, theirs = load_tokenizer(config.tokenizer), AutoTokenizer.from_pretrained(out)
        text = "the cat sat on the mat"
        assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text).tolist()
        settings = json.loads((out / "config.json").read_text())
        assert settings["eos_token_id"] == ours.end_of_document == backend.token_to_id("</s>")
    config.tokenizer = new_section("tokenizer", "byte")
    (note,) = export(config, checkpoint, tmp_path / "bytes", dtype=torch.float32).notes
    assert "byte tokenizer has none" in note
