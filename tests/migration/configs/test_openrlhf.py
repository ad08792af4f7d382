"""OpenRLHF's command lines: shell scripts, programs, and what their arguments are here."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainctl.errors import TrainctlError
from trainctl.migration.configs.import_file import import_file, read_document
from trainctl.migration.configs.import_table import import_document
from trainctl.migration.configs.result import Why
from trainctl.migration.configs.tables import detect, load_table

HUB = "hf://datasets/a/b@refs/convert/parquet/default"
SCRIPT = r"""set -x
MODEL=org/model   # not a plain assignment
DATA="a/b"
ROLLOUT_ARGS=(
   --rollout.batch_size 64
   # --rollout.batch_size 128
   --rollout.n_samples_per_prompt 8
   --rollout.temperature=0.9
)
ray job submit --address="http://127.0.0.1:8265" \
   -- python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path /models/8b \
   --data.prompt_dataset ${DATA} \
   "${ROLLOUT_ARGS[@]}" \
   --train.batch_size 128 \
   --actor.adam.lr 5e-7 \
   --actor.eps_clip_low_high 0.2 0.27 \
   --data.apply_chat_template \
   --logger.wandb.key 0123456789abcdef0123456789abcdef01234567 \
   --ds.zero_stage 3
echo done --not.an.option
"""


def convert(program: str, **document):
    named = {"openrlhf": program, **{k.replace("__", "."): v for k, v in document.items()}}
    return import_document(load_table("openrlhf"), named, folder=Path())


def left(result, why=Why.left):
    return {each.key for each in result.left_out if each.why is why}


def test_a_script_is_read_with_its_arrays_and_variables(tmp_path):
    file = tmp_path / "train.sh"
    file.write_text(SCRIPT)
    document = read_document(file)
    assert document.pop("openrlhf") == "train_ppo_ray"
    assert document == {
        "actor.model_name_or_path": "/models/8b",
        "data.prompt_dataset": "a/b",
        "rollout.batch_size": 64,
        "rollout.n_samples_per_prompt": 8,
        "rollout.temperature": 0.9,
        "train.batch_size": 128,
        "actor.adam.lr": 5e-7,
        "actor.eps_clip_low_high": [0.2, 0.27],
        "data.apply_chat_template": True,
        "logger.wandb.key": "0123456789abcdef0123456789abcdef01234567",
        "ds.zero_stage": 3,
    }
    assert detect(document, {*document}, file="f") == "openrlhf"
    imported = import_file(file)
    assert imported.choices["objective"] == "grpo" and imported.choices["zero_stage"] == "3"
    assert imported.settings["objective.updates"] == 4
    assert imported.settings["logging.to"] == ["wandb"]
    assert "0123456789" not in imported.recipe
    assert not [each for each in imported.left_out if each.why is Why.unknown]


@pytest.mark.parametrize(
    ("text", "words"),
    [("echo nothing\n", "no command with options"), ('x --a "b\n', "No closing quotation")],
)
def test_a_script_without_a_command_is_refused(tmp_path, text, words):
    file = tmp_path / "train.sh"
    file.write_text(text)
    with pytest.raises(TrainctlError, match=words):
        read_document(file)


def test_sampling_and_rewards():
    result = convert(
        "train_ppo_ray",
        data__prompt_dataset="a/b",
        data__input_key="question",
        data__label_key="label",
        data__max_len=4096,
        rollout__max_new_tokens=3072,
        rollout__n_samples_per_prompt=16,
        rollout__batch_size=128,
        train__batch_size=1024,
        algo__advantage__estimator="dr_grpo",
        algo__kl__init_coef=1e-3,
        actor__policy_loss_type="gspo",
        reward__overlong_buffer_len=512,
        critic__adam__lr=9e-6,
        vllm__num_engines=4,
    )
    objective = {k.removeprefix("objective."): v for k, v in result.settings.items()}
    assert objective["rewards"] == {
        "exact_answer": {"kind": "exact_answer", "column": "label"},
        "length": {"kind": "length", "most_tokens": 3072, "soft_tokens": 512, "weight": 1.0},
    }
    assert (objective["max_prompt_tokens"], objective["max_answer_tokens"]) == (1024, 3072)
    assert (objective["samples"], objective["updates"]) == (16, 2)
    assert (objective["advantage"], objective["normalize_by"]) == ("centered", "length")
    assert objective["ratio"] == "sequence" and "kl_weight" not in objective
    assert left(result) == {"algo.kl.init_coef"}
    assert result.settings["data.prompt_key"] == "question"
    assert result.settings["data.paths"] == [f"{HUB}/train/*.parquet"]
    critic = convert("train_ppo_ray", prompt_data="a/b", remote_rm_url="x/judge.py")
    assert {"remote_rm_url"} <= left(critic)
    assert {"algo.advantage.estimator"} <= left(critic, Why.default)
    call = critic.settings["objective.rewards"]["reward"]["call"]
    assert call == "judge:reward_func"


@pytest.mark.parametrize("rank", [0, 8])
def test_sampled_answers_validate(tmp_path, rank):
    file = tmp_path / "train.sh"
    file.write_text(
        "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path org/m "
        "--data.prompt_dataset a/b --data.label_key label --algo.advantage.estimator group_norm "
        "--algo.kl.use_loss --algo.kl.init_coef 1e-3 --train.num_episodes 3 --train.batch_size 64 "
        f"--rollout.batch_size 8 --rollout.n_samples_per_prompt 8 --ds.lora.rank {rank}"
    )
    found = import_file(file)
    assert left(found) == ({*()} if rank else {"algo.kl.init_coef"})
    assert found.settings["training.epochs"] == 3
    assert found.settings.get("objective.kl_weight") == (1e-3 if rank else None)
    assert found.missing == ()


def test_programs_without_rollouts_and_flags_of_older_versions():
    sft = convert("train_sft", pretrain="org/m", dataset="a/b", lora_rank=8, learning_rate=1e-5)
    assert sft.choices["adapter"] == "lora" and sft.choices["data"] == "chat"
    assert sft.settings["optimizer.lr"] == 1e-5 and sft.settings["training.epochs"] == 2.0
    assert sft.settings["training.sequence_length"] == 2048
    dpo = convert("train_dpo", beta=0.05, ipo=True, zero_stage=2, micro_train_batch_size=2)
    assert dpo.settings["training.sequence_length"] == 2 * 512
    long = convert("train_rm", data__max_len=4096)
    assert long.settings["training.sequence_length"] == 2 * 4096 and "data.max_len" in left(long)
    assert dpo.choices["objective"] == "dpo" and dpo.settings["objective.loss"] == "ipo"
    assert dpo.settings["objective.beta"] == 0.05 and dpo.settings["training.micro_batch_size"] == 2
    reward = convert("train_rm", eval__dataset="c/d", eval__steps=50, rollout__batch_size=8)
    assert (reward.choices["objective"], reward.choices["data"]) == ("reward", "preferences")
    assert reward.settings["training.evaluate_every_steps"] == 50
    assert "rollout.batch_size" in left(reward, Why.ignored)
    kto = convert("train_kto", beta=0.2, desirable_loss_weight=1.33)
    assert (kto.choices["objective"], kto.choices["data"]) == ("kto", "answers")
    assert kto.settings["objective.desirable_weight"] == 1.33
    assert "openrlhf" in left(convert("train_prm"))
