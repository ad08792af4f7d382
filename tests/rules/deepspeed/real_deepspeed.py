"""Run as a process: what the real DeepSpeed does with each of many JSONs.

Reads a list of cases from standard input and writes one answer a line. Each case runs in ranks
forked from this process, which has imported torch and DeepSpeed and nothing else of them: a case
starts at once, and leaves nothing behind for the next. The ranks build a small model, call
`deepspeed.initialize`, and take one optimizer step.
"""

import contextlib
import gc
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Muon's kernels would be compiled in each rank
import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# Importing Muon compiles helpers of torch: once here, not in each of the ranks.
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402
import deepspeed.runtime.zero.stage3  # noqa: E402

WIDTH, BATCH = 16, 2
CASE_SECONDS = 60.0
"""A case that takes longer is answered as hung, and its ranks are killed."""


class Model(torch.nn.Module):
    """A norm, two matrices that AutoTP can split by column and by row, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.norm(inputs))).float().square().mean()


def train(case: dict[str, Any], rank: int, store: str) -> dict[str, Any]:
    """Initialise and step once; what the engine then holds."""
    ranks = case["world_size"]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(CROSS_RANK="0", CROSS_SIZE="1", LOCAL_SIZE=str(ranks))
    deepspeed.init_distributed(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, auto_mpi_discovery=False
    )
    torch.manual_seed(0)
    model: Any = Model()
    if case.get("stages"):
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        model = deepspeed.pipe.PipelineModule(
            layers, num_stages=case["stages"], loss_fn=lambda out, _: out.float().square().mean()
        )
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config=case["path"],
    )
    dtype = next(iter(engine.module.parameters())).dtype
    inputs = torch.randn(BATCH, WIDTH, dtype=dtype)
    if case.get("stages"):
        engine.train_batch(iter([(inputs, inputs)] * 64))
    else:
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(inputs))
            engine.step()
    return {"steps": engine.global_steps, "lr": engine.get_lr() if engine.optimizer else []}


def rank_process(case: dict[str, Any], rank: int, folder: str) -> None:
    """Run one rank in this process: write its answer, then exit without cleanup."""
    os.setsid()
    log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        answer = {"ok": train(case, rank, f"{folder}/store")}
    except BaseException as error:  # the caller compares what DeepSpeed said
        answer = {"error": f"{type(error).__name__}: {error}"[:600]}
    Path(f"{folder}/answer{rank}.part").write_text(json.dumps(answer, default=str))
    Path(f"{folder}/answer{rank}.part").rename(f"{folder}/answer{rank}")
    sys.stdout.flush()
    os._exit(0)


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Return the first error of a rank, or the answer of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        text = case.get("text") or json.dumps(case["json"])
        case["path"] = f"{folder}/ds_config.json"
        Path(case["path"]).write_text(text)
        ranks = []
        for rank in range(case["world_size"]):
            child = os.fork()
            if child == 0:
                rank_process(case, rank, folder)
            ranks.append(child)
        try:
            return wait(ranks, folder)
        finally:
            for child in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, 0)


def wait(ranks: list[int], folder: str) -> dict[str, Any]:
    """Wait until every rank has answered, or one has failed, died or hung; return the result."""
    end = time.monotonic() + CASE_SECONDS
    answers: dict[int, dict[str, Any]] = {}
    while time.monotonic() < end:
        for rank, child in enumerate(ranks):
            if rank in answers:
                continue
            dead, status = os.waitpid(child, os.WNOHANG)
            path = Path(f"{folder}/answer{rank}")
            if path.exists():
                answers[rank] = json.loads(path.read_text())
                if "error" in answers[rank]:
                    return answers[rank]
            elif dead:
                log = Path(f"{folder}/log{rank}").read_text()[-500:]
                return {"error": f"the process died with status {status}: {log}"}
        if len(answers) == len(ranks):
            return answers[0]
        time.sleep(0.005)
    return {"error": "hung"}


if __name__ == "__main__":
    torch.set_num_threads(1)
    # A collection in a rank would copy all that it shares with this process.
    gc.collect()
    gc.freeze()
    gc.disable()
    answers, sys.stdout = sys.stdout, sys.stderr  # DeepSpeed prints
    for line in sys.stdin:
        started = time.monotonic()
        answer = run(json.loads(line))
        answer["seconds"] = round(time.monotonic() - started, 2)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
