"""A DeepSpeed JSON with what it will meet: what the rules look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from trainctl.config.schema import Accelerator, ModelConfig
from trainctl.rules.deepspeed.names import Names
from trainctl.rules.deepspeed.values import read, words
from trainctl.rules.deepspeed_schema import Key, Path, Schema, load

AUTO = "auto"
FP32 = ("fp32", "float32", "float")
FILLED_BY_OTHERS = frozenset(
    words(
        """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
    optimizer.params.lr optimizer.params.betas optimizer.params.eps optimizer.params.weight_decay
    scheduler.params.warmup_min_lr scheduler.params.warmup_max_lr
    scheduler.params.warmup_num_steps scheduler.params.total_num_steps
    fp16.enabled bf16.enabled
    zero_optimization.stage zero_optimization.reduce_bucket_size
    zero_optimization.stage3_prefetch_bucket_size
    zero_optimization.stage3_param_persistence_threshold
    zero_optimization.stage3_gather_16bit_weights_on_model_save
    zero_optimization.offload_optimizer.device zero_optimization.offload_optimizer.nvme_path
    zero_optimization.offload_param.device zero_optimization.offload_param.nvme_path
    """
    )
)
"""Keys whose "auto" the Trainer of transformers or accelerate replaces on the way to DeepSpeed."""

MEANS_ITSELF = frozenset(
    words(
        """
    data_types.keep_in_fp32_modules pipeline.stages
    zero_optimization.zenflow.select_strategy zero_optimization.zenflow.select_interval
    zero_optimization.zenflow.update_interval
    expert_parallel.score_func expert_parallel.score_apply expert_parallel.combine_impl
    expert_parallel.row_weighting_impl expert_parallel.top_k expert_parallel.routed_scaling_factor
    """
    )
)
"""Keys of which "auto" is a value of DeepSpeed's own; inside a section that it checks, DeepSpeed
drops the word there too, and takes the default, which is the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is known about where the JSON will be used; none where nothing is."""

    world_size: int | None = None
    """Ranks."""
    data_parallel_size: int | None = None
    """What the script's own mpu says; none without an mpu, where DeepSpeed counts ranks itself."""
    devices_per_node: int | None = None
    """Ranks of a node."""
    accelerator: Accelerator | None = None
    pipeline_stages: int = 1
    """Stages of the script's PipelineModule; 1 is none."""
    has_optimizer: bool | None = None
    """Whether the script passes an optimizer of its own."""
    fills_auto: bool = False
    """Whether transformers or accelerate fill in "auto" on the way."""
    own_trainer: bool = False
    """Whether trainctl's trainer reads it, which puts some of DeepSpeed right."""
    model: ModelConfig | None = None
    """Shape of the model."""


@dataclass(frozen=True)
class Case:
    """A JSON as DeepSpeed will understand it."""

    json: Mapping[str, Any]
    around: Surroundings = field(default_factory=Surroundings)
    schema: Schema = field(default_factory=load)
    """Keys of the version of DeepSpeed that reads it."""
    names: Names = field(default_factory=Names)
    """How messages name its keys."""

    @cached_property
    def values(self) -> dict[str, Any]:
        """Every value by dotted key, other spellings and deprecated keys taken over.

        None for what DeepSpeed cannot read, or somebody else will fill in: no rule can speak of it.
        """
        found: dict[str, Any] = {}
        for path, value, key in self.entries():
            if key is None:
                continue
            name = key.same_as or key.name
            if self.is_filled(path, value):
                found[name] = None
            elif value == AUTO and key.name not in MEANS_ITSELF and key.checked:
                continue  # dropped: the default holds
            else:
                found[name] = read(key, value).value
        self._take_over(found)
        return found

    def entries(self) -> Iterator[tuple[Path, Any, Key | None]]:
        """Every key at every depth, with its value and what the schema says of it.

        Inside a section that may hold anything, and beneath an unknown key, nothing is looked at.
        """
        yield from self._entries(self.json, ())

    def get(self, name: str) -> Any:
        """The value that is in force: as given, else DeepSpeed's default; none if unknown."""
        if name in self.values:
            return self.values[name]
        key = self.schema.keys[name]
        return key.default

    def setting(self, name: str) -> str:
        """A key with the value that is in force, in the reader's words."""
        return self.names.setting(name, self.get(name))

    def given(self, name: str) -> bool:
        """Whether the JSON has the key, under any of its names, with a value."""
        return self.values.get(name) is not None

    def has(self, name: str) -> bool:
        """Whether the JSON has the key at all, be its value unknown."""
        return name in self.values

    def is_filled(self, path: Path, value: Any) -> bool:
        """Whether the value is an "auto" that transformers or accelerate will replace."""
        return self.around.fills_auto and value == AUTO and ".".join(path) in FILLED_BY_OTHERS

    def params(self, section: str) -> Mapping[str, Any]:
        """`optimizer.params` or `scheduler.params`, without what others fill in."""
        block = self.json.get(section)
        params = block.get("params") if isinstance(block, Mapping) else None
        if not isinstance(params, Mapping):
            return {}
        return {
            name: value
            for name, value in params.items()
            if not self.is_filled((section, "params", name), value)
        }

    @property
    def stage(self) -> int | None:
        """The ZeRO stage."""
        if isinstance(self.json.get("zero_optimization"), bool):
            return int(self.json["zero_optimization"])
        stage = self.get("zero_optimization.stage")
        return stage if stage in (0, 1, 2, 3) else None

    @property
    def offload_device(self) -> str:
        """Where the optimizer's states are: none, cpu or nvme."""
        return str(self.get("zero_optimization.offload_optimizer.device") or "none")

    @property
    def parameter_device(self) -> str:
        """Where the parameters are: none, cpu or nvme."""
        return str(self.get("zero_optimization.offload_param.device") or "none")

    @property
    def is_offloaded(self) -> bool:
        return self.offload_device != "none"

    @property
    def weights(self) -> str | None:
        """Number format of the weights: fp16, bf16 or fp32; none if others decide it."""
        fp16, bf16 = self.get("fp16.enabled"), self.get("bf16.enabled")
        if fp16 is None or bf16 is None:
            return None
        return "fp16" if fp16 else "bf16" if bf16 else "fp32"

    @property
    def is_bf16_optimizer(self) -> bool:
        """Whether stage 1 is done by runtime/bf16_optimizer.py, which does less than the others.

        It is for bf16 weights with fp32 sums of gradients, where nothing is offloaded to the host.
        """
        sums = self.get("data_types.grad_accum_dtype")
        is_wide = isinstance(sums, str) and sums.removeprefix("torch.") in FP32
        is_bf16 = self.weights == "bf16" and is_wide
        return self.stage == 1 and is_bf16 and self.offload_device != "cpu"

    @property
    def optimizer(self) -> str | None:
        """Name of the optimizer, in lower case where it is DeepSpeed's own."""
        name = self.get("optimizer.type")
        if not isinstance(name, str):
            return None
        return name.lower() if name.lower() in self.schema.optimizers else name

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are known to be CPUs."""
        return self.around.accelerator is Accelerator.cpu

    @property
    def off_cuda(self) -> bool:
        """Whether the devices are known not to be NVIDIA's."""
        return self.around.accelerator not in (None, Accelerator.auto, Accelerator.cuda)

    @property
    def tensor_size(self) -> int:
        """Ranks that AutoTP splits each matrix over; 1 without it."""
        size = self.get("tensor_parallel.autotp_size")
        return size if isinstance(size, int) and size > 1 else 1

    @property
    def counted_ranks(self) -> float | None:
        """The number of ranks that DeepSpeed's batch check multiplies by (runtime/config.py)."""
        around = self.around
        if around.data_parallel_size is not None:
            return around.data_parallel_size
        if around.world_size is None:
            return None
        world = around.world_size
        sequence, data = self.get("sequence_parallel_size"), self.get("data_parallel_size")
        if isinstance(sequence, int) and sequence > 0:
            return data if self.has("data_parallel_size") and data else world / sequence
        return world / around.pipeline_stages

    def _entries(
        self, section: Mapping[str, Any], prefix: Path
    ) -> Iterator[tuple[Path, Any, Key | None]]:
        for name, value in section.items():
            path = (*prefix, str(name))
            key = self.schema.find(path)
            yield path, value, key
            is_open = key is not None and key.is_section and key.unknown != "free"
            if is_open and isinstance(value, Mapping):
                yield from self._entries(value, path)

    def _take_over(self, found: dict[str, Any]) -> None:
        """What deprecated keys set, as DeepSpeed does it."""
        zero = "zero_optimization"
        for old, new in (
            ("cpu_offload", "offload_optimizer"),
            ("cpu_offload_param", "offload_param"),
        ):
            if found.get(f"{zero}.{old}"):
                found.setdefault(f"{zero}.{new}.device", "cpu")
        old, new = "stage3_gather_fp16_weights_on_model_save", "gather_16bit_weights_on_model_save"
        if f"{zero}.{old}" in found:
            found.setdefault(f"{zero}.stage3_{new}", found[f"{zero}.{old}"])
        if self.json.get("bf16") is None:
            for name in self.schema.inside(("bfloat16",)):
                if f"bfloat16.{name}" in found:
                    found[f"bf16.{name}"] = found[f"bfloat16.{name}"]
