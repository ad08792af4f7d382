"""Training commands of launch scripts: found, read with their ranks, and never run."""

from __future__ import annotations

import json

import pytest

from trainctl.errors import TrainctlError
from trainctl.migration.configs.import_file import import_file, read_document
from trainctl.migration.configs.launch_script import read_launch_script

NODES, RANKS = "hardware.nodes", "hardware.devices_per_node"
OPTIONS = "--learning_rate 1e-4 --max_steps 4 --per_device_train_batch_size 2"


def machines(text: str):
    return read_launch_script(text, "train.sh").settings


@pytest.mark.parametrize(
    ("text", "nodes", "ranks"),
    [
        ("torchrun --nproc_per_node=8 train.py", None, 8),
        ("torchrun --standalone --nproc-per-node 4 -m pkg.train", None, 4),
        ("python -m torch.distributed.run --nnodes 2 --nproc_per_node 8 train.py", 2, 8),
        ("python3 -u -m torch.distributed.launch --nproc_per_node=2 train.py", None, 2),
        ("CUDA_VISIBLE_DEVICES=0,1 deepspeed --num_gpus 2 --master_port 1 train.py", None, 2),
        ("deepspeed --num_nodes=2 --num_gpus=8 train.py", 2, 8),
        ("srun -N 2 --ntasks-per-node=4 python train.py", 2, 4),
        ("#SBATCH --nodes=2\n#SBATCH --ntasks 16\nsrun python train.py", 2, 8),
        ('N=8\nsrun --nodes 2 bash -c "torchrun --nnodes 2 --nproc_per_node $N train.py', 2, 8),
        ("mpirun -n 2 torchrun --nproc_per_node 8 train.py", None, 8),
        ("if true; then\n  torchrun --nproc_per_node 8 train.py", None, 8),
        ("cd /x && exec torchrun --nproc_per_node 8 train.py", None, 8),
        ("python train.py", None, None),
    ],
)
def test_ranks_of_a_launcher(text, nodes, ranks):
    end = '"' if 'bash -c "' in text else ""
    found = machines(f"{text} {OPTIONS}{end}\n")
    assert (found.get(NODES), found.get(RANKS)) == (nodes, ranks)


def test_a_launcher_of_several_machines_is_chosen():
    srun = machines(f"srun --nodes 2 torchrun --nnodes 2 --nproc_per_node 8 train.py {OPTIONS}")
    assert srun["launcher"] == "slurm"
    ssh = machines(f"torchrun --nnodes 2 --nproc_per_node 8 train.py {OPTIONS}")
    assert ssh["launcher"] == "ssh"
    hosts = machines(f"deepspeed --hostfile=hosts train.py {OPTIONS}")
    assert hosts == {"launcher": "ssh", "launcher.hostfile": "hosts"}


SCRIPT = r"""#!/bin/bash
#SBATCH --nodes=2
B=${B:-4}           # of a rank
ACCUMULATION=$((32 / (B * 2)))
LR="2e-5"
COMMON=(
  --learning_rate $LR   # not 9
  # --max_steps 9
)
COMMON+=(--max_steps 10)
EXTRA="--weight_decay 0.1 --seed 3"
echo torchrun begins with --learning_rate 9
pip install torchrun --upgrade
cat <<EOF > notes
torchrun never.py --learning_rate 9
EOF
python prepare.py --output data > log 2>&1
srun --jobid "$SLURM_JOB_ID" bash -c 'torchrun --nproc_per_node=8 --nnodes $SLURM_NNODES \
  --rdzv_endpoint $HOST:29500 train.py --per_device_train_batch_size '$B' \
  --gradient_accumulation_steps $ACCUMULATION "${COMMON[@]}" $EXTRA --output_dir "$OUT/run 1"' &
torchrun --nproc_per_node 4 evaluate.py --learning_rate 9
"""


def test_a_script_is_read_as_its_shell_would(tmp_path):
    file = tmp_path / "train.sh"
    file.write_text(SCRIPT)
    for tool in (None, "training_arguments"):
        found = import_file(file, tool=tool)
        expected = {
            "training.micro_batch_size": 4,
            "training.gradient_accumulation_steps": 4,
            "training.steps": 10,
            "training.seed": 3,
            "optimizer.lr": 2e-5,
            "optimizer.weight_decay": 0.1,
            NODES: 2,
            RANKS: 8,
        }
        assert {key: found.settings.get(key) for key in expected} == expected
        assert found.choices["launcher"] == "slurm" and "output_dir" not in found.carried
        (several,) = (each for each in found.findings if each.rule == "TC572")
        assert "line 18 (torchrun train.py) is imported, and not line 21" in several.message
    assert "trap" not in {each.name for each in tmp_path.iterdir()}


@pytest.mark.parametrize(
    "text",
    [
        "torchrun train.py --learning_rate $(cat rate) --max_steps 4",
        "torchrun train.py --learning_rate $RATE --max_steps 4",
        "torchrun train.py --learning_rate $((RANDOM * 2)) --max_steps 4",
        "torchrun train.py --learning_rate ${RATE%x} --max_steps 4",
        "torchrun train.py --learning_rate `cat rate` --max_steps 4",
        "torchrun train.py --learning_rate=$1 --max_steps 4",
        "for R in 1e-4 2e-4; do torchrun train.py --learning_rate $R --max_steps 4; done",
        "if x; then R=1; else R=2; fi; torchrun train.py --learning_rate $R --max_steps 4",
        "[ -z $R ] && R=1; torchrun train.py --learning_rate $R --max_steps 4",
        "R=$(cat rate); torchrun train.py --learning_rate $R --max_steps 4",
    ],
)
def test_what_only_a_shell_knows_is_refused_with_its_line(tmp_path, text):
    file = tmp_path / "train.sh"
    options = "--max_steps 4 --per_device_train_batch_size 2"
    file.write_text(f"set -e\n{text.replace('--max_steps 4', options)}\n")
    with pytest.raises(TrainctlError, match=r"line 2: --learning_rate is .*only a running shell"):
        import_file(file)


def test_nothing_of_a_script_is_run(tmp_path):
    trap = tmp_path / "trap"
    file = tmp_path / "train.sh"
    file.write_text(
        f"touch {trap}\nX=$(touch {trap})\nY=`touch {trap}`\nZ=$((__import__('os').system('x')))\n"
        f"bash -c 'touch {trap}'\ntorchrun train.py {OPTIONS} --output_dir $X$Y$Z\n"
    )
    assert import_file(file).settings["training.steps"] == 4 and not trap.exists()


def test_arguments_of_the_script_itself_are_said(tmp_path):
    file = tmp_path / "train.sh"
    file.write_text(f'torchrun --nproc_per_node gpu train.py {OPTIONS} "$@"\n')
    found = import_file(file)
    told = [each for each in found.findings if each.rule == "TC573"]
    assert all(any(x in each.message for each in told) for x in ("$@,", "gpu,"))
    assert found.settings["training.micro_batch_size"] == 2 and RANKS not in found.settings


def test_a_command_with_a_configuration_file_names_it(tmp_path):
    file = tmp_path / "train.sh"
    file.write_text("torchrun --nproc_per_node 8 train.py config.yaml\n")
    with pytest.raises(TrainctlError, match=r"line 1 \(torchrun train.py\) has no options") as it:
        import_file(file)
    assert "trainctl config import config.yaml" in it.value.hint


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('A="$A$A"\n' * 3 + "A=xxxxxxxx\n" + 'A="$A$A"\n' * 40, "characters"),
        ("torchrun train.py '--a", "No closing quotation"),
        ("torchrun train.py --a ${B", "no closing }"),
    ],
)
def test_hostile_scripts_are_refused(tmp_path, text, words):
    file = tmp_path / "train.sh"
    file.write_text(text)
    with pytest.raises(TrainctlError, match=words):
        read_document(file)


ACCELERATE = {
    "distributed_type": "DEEPSPEED",
    "num_machines": 1,
    "num_processes": 8,
    "mixed_precision": "bf16",
    "deepspeed_config": {"zero_stage": 3, "gradient_accumulation_steps": 4},
}
ARGUMENTS = {"learning_rate": 1e-4, "max_steps": 4, "per_device_train_batch_size": 2}


def test_accelerate_beside_arguments_is_one_import(tmp_path):
    machine, arguments = tmp_path / "accelerate.yaml", tmp_path / "arguments.yaml"
    machine.write_text(json.dumps(ACCELERATE))
    arguments.write_text(json.dumps(ARGUMENTS))
    script = tmp_path / "train.sh"
    script.write_text(f"accelerate launch --config_file accelerate.yaml train.py {OPTIONS}\n")
    for files in ((machine, arguments), (arguments, machine), (script,)):
        found = import_file(*files)
        assert found.tool == "training_arguments"
        assert found.choices["zero_stage"] == "3" and found.choices["precision"] == "bf16"
        assert found.settings[RANKS] == 8
        assert found.settings["training.gradient_accumulation_steps"] == 4
        assert found.settings["training.micro_batch_size"] == 2
    script.write_text(
        f"accelerate launch --config_file accelerate.yaml --num_processes 4 --zero_stage 2 "
        f"train.py {OPTIONS}\n"
    )
    found = import_file(script)
    assert (found.settings[RANKS], found.choices["zero_stage"]) == (4, "2")


def test_a_conflict_of_accelerate_and_arguments_is_named(tmp_path):
    machine, arguments = tmp_path / "accelerate.yaml", tmp_path / "arguments.yaml"
    machine.write_text(json.dumps(ACCELERATE))
    arguments.write_text(json.dumps(ARGUMENTS | {"gradient_accumulation_steps": 2}))
    words = "deepspeed_config.gradient_accumulation_steps asks for .*=4, and .* for 2"
    with pytest.raises(TrainctlError, match=words):
        import_file(machine, arguments)
    section = {"zero_stage": 3, "gradient_accumulation_steps": "auto"}
    machine.write_text(json.dumps(ACCELERATE | {"deepspeed_config": section}))
    found = import_file(machine, arguments)
    assert found.settings["training.gradient_accumulation_steps"] == 2
