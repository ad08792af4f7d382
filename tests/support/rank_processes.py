"""Real ranks for tests: gloo processes, forked from a server that has imported everything."""

from __future__ import annotations

import atexit
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fork_server import ForkServer

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.registry import new_section
from trainctl.config.schema import (
    Accelerator,
    DataType,
    ModelConfig,
    OffloadDevice,
    RunConfig,
)
from trainctl.data.cache_files import cache_folder
from trainctl.data.corpus import Corpus
from trainctl.data.prepare import prepare
from trainctl.hardware import Hardware
from trainctl.options.adapter import low_rank
from trainctl.plans.derive import is_counted_in_epochs
from trainctl.plans.trainable import quantized_layers
from trainctl.plans.types import RunPlan
from trainctl.rules.resolve import resolve
from trainctl.runs.checkpoints import list_checkpoints
from trainctl.runs.files import write_json
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events, step_curve

PRELOAD = (
    "ranks",
    "trainctl.engines.deepspeed.entry",
    # Modules that DeepSpeed's engine imports only when it is built.
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.qwen3.modeling_qwen3",
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}
SECONDS = 300.0
"""Limit of one case, or of a group of cases that share their processes."""
TOGETHER = 10
"""Largest number of cases that share processes, so that the group ends within the limit."""


_servers: list[ForkServer] = []
_corpora: dict[str, Corpus] = {}
"""Prepared corpora by the settings they depend on."""


@dataclass(frozen=True)
class Case:
    """Plan to train in a run directory."""

    plan: RunPlan
    run: RunPaths
    attempt: int = 1

    def __getstate__(self) -> dict[str, Any]:
        """Drop sections whose classes are created at reading time and cannot be pickled."""
        return {**vars(self), "plan": to_plain(self.plan)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in {**state, "plan": from_plain(RunPlan, state["plan"])}.items():
            object.__setattr__(self, name, value)


def tiny_config(**changes: Any) -> RunConfig:
    """Return a model of 0.1 million parameters on 1.5 MB of the standard library, in fp32.

    CPUs without bf16 products are thirty times slower in bf16.

    Args:
        changes: Keys of `training`, or of another section as `zero_stage__stage=2`. Enums may be
            given by their value.
    """
    config = RunConfig()
    config.model = ModelConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=176,
        num_layers=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    config.data = new_section("data", "stdlib", max_bytes=1_500_000)
    config.zero_stage.param_persistence_threshold = 1000
    config.zero_stage.sub_group_size = 60_000
    config.zero_stage.reduce_bucket_size = 500_000
    config.zero_stage.allgather_bucket_size = 500_000
    config.zero_stage.prefetch_bucket_size = 100_000
    config.precision.compute = DataType.fp32
    values = {"sequence_length": 128, "global_batch_size": 8, "evaluation_samples": 8, "seed": 7}
    plain = to_plain(config)
    for key, value in {**values, "gradient_accumulation_steps": 2, **changes}.items():
        section, _, name = key.rpartition("__")
        plain[section or "training"][name] = to_plain(value)
    return from_plain(RunConfig, plain)


def tiny_plan(config: RunConfig, world_size: int) -> RunPlan:
    """Return the plan on `world_size` processes; fails on any finding that is an error."""
    hardware = Hardware(
        name="cpu", accelerator=Accelerator.cpu, nodes=1, devices_per_node=world_size
    )
    resolution = resolve(config, hardware)
    assert resolution.plan is not None, resolution.findings
    return resolution.plan


def train_cases(
    world_size: int, cases: list[Case], *, together: bool = False, probe: str = ""
) -> list[Any]:
    """Train every case on `world_size` fresh processes; return the results of `probe` by rank.

    Args:
        together: Train several cases one after the other in the same processes: start-up is half of
            a small case.
        probe: ``module:function`` called once as ``function(cases, process)`` in place of training.

    Raises:
        RanksFailed: The message ends with the output of the failed rank.
    """
    for case in cases:
        attempt = case.run.attempt(case.attempt)
        attempt.root.mkdir(parents=True, exist_ok=True)
        write_json(attempt.plan, to_plain(case.plan))
        prepare_once(case.plan, case.run)
    for operator in sorted(set().union(*(_operators(case.plan) for case in cases))):
        # Once for all ranks and without a time limit: a compiler that is killed leaves a lock.
        server().prepare("ranks:load_operator", operator)
    if any(quantized_layers(c.plan.config.model, low_rank(c.plan.config.adapter)) for c in cases):
        server().prepare("ranks:load_module", "bitsandbytes")
    if probe:
        return server().run("ranks:probe", (cases, probe), world_size, SECONDS)
    most = TOGETHER if together else 1
    for first in range(0, len(cases), most):
        server().run("ranks:train", cases[first : first + most], world_size, SECONDS)
    return []


def prepare_once(plan: RunPlan, run: RunPaths) -> None:
    """Prepare as a launch does, but scan the standard library only once: a scan takes as long as
    ten steps of the tiny model.
    """
    config = plan.config
    if config.data.kind != "stdlib" or config.data.sources or is_counted_in_epochs(config.training):
        prepare(plan, run)
        return
    parts = (config.data, config.tokenizer, config.training.sequence_length)
    key = repr((parts, config.model.vocab_size, cache_folder()))
    known = _corpora.get(key)
    if known is None or run.corpus.exists() or not Path(known.folder).is_dir():
        prepare(plan, run)
        _corpora[key] = Corpus.load(run.corpus)
    else:
        write_json(run.corpus, asdict(known))


def trained(folder: Path, config: RunConfig, processes: int = 1) -> RunPaths:
    """Train one configuration on fresh processes and return its run."""
    run = RunPaths(folder)
    train_cases(processes, [Case(tiny_plan(config, processes), run)])
    return run


def goes_on_exactly(
    folder: Path, plan: RunPlan, step: int, *, probe: str = ""
) -> tuple[RunPaths, RunPaths, list[Any]]:
    """Train a plan whole, and once more from its checkpoint of a step, with the same curve.

    Returns:
        Both runs, and what `probe` returned of the second, by rank.
    """
    whole, again = RunPaths(folder / "whole"), RunPaths(folder / "again")
    train_cases(plan.mesh.world_size, [Case(plan, whole)], probe=probe)
    shutil.copytree(whole.root, again.root)
    for later in (info for info in list_checkpoints(again) if info.step > step):
        shutil.rmtree(later.path)
    results = train_cases(plan.mesh.world_size, [Case(plan, again, 2)], probe=probe)
    made = [event["step"] for event in read_events(again.events, "step") if event["attempt"] == 2]
    assert made == list(range(step + 1, plan.total_steps + 1))
    assert curve(again) == curve(whole) and len(curve(whole)) == plan.total_steps
    return whole, again, results


def server() -> ForkServer:
    """Return the fork server shared by all tests of a session; it ends with the session."""
    if not _servers or not _servers[-1].is_alive:
        _servers.append(ForkServer(PRELOAD, ENVIRONMENT))
        atexit.register(_servers[-1].close)
    return _servers[-1]


def _operators(plan: RunPlan) -> set[str]:
    """Return the DeepSpeed operators that the plan compiles at their first use."""
    offload = plan.config.offload
    operators = set()
    kind = plan.config.optimizer.kind
    if offload.optimizer is not OffloadDevice.none and kind != "sgd":
        is_lion = kind == "lion"
        operators.add("CPULionBuilder" if is_lion else "CPUAdamBuilder")
    if OffloadDevice.nvme in (offload.optimizer, offload.parameters):
        operators.add("AsyncIOBuilder")
    return operators


def curve(run: RunPaths) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step."""
    steps = step_curve(read_events(run.events))
    return {step: (event["loss"], event["grad_norm"]) for step, event in steps.items()}


def with_stop(plan: RunPlan, step: int) -> RunPlan:
    """Return the plan with its launch ending at `step`."""
    return replace(plan, stop_step=step)
