"""Input of the rules: a DeepSpeed JSON with the known facts about its use, and its values as read.

Values are converted as DeepSpeed does it. Sections that are pydantic models convert like
pydantic's lax mode (a number in quotes, 1 for true). Other values are used unconverted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from trainctl.config.schema import Accelerator, ModelConfig
from trainctl.config.suggest import nearest_names, words
from trainctl.rules.deepspeed_schema import Key, Path, Schema, load

SWITCHES = {"true": True, "t": True, "yes": True, "y": True, "on": True, "1": True}
SWITCHES |= {"false": False, "f": False, "no": False, "n": False, "off": False, "0": False}
INTEGER = re.compile(r"\s*[-+]?\d[\d_]*(\.0*)?\s*")
LONGEST = 60
"""Maximum characters of a value in a message."""

WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "list": "a list",
    "section": "an object of keys",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """Result of converting a value."""

    value: Any
    """Value in its key's type; None if it cannot be converted."""
    problem: str = ""
    """Why the value cannot be converted; empty if it can."""
    hint: str = ""
    """Nearest correct way to write the value."""
    is_loose: bool = False
    """Whether the value can be converted but is not written in its type."""


def read_value(key: Key, value: Any) -> Reading:
    """Convert a value to the type of its key."""
    if value is None:
        return _read_null(key)
    if key.type in ("any", "section"):
        return Reading(value)
    if key.type == "list":
        return Reading(value) if isinstance(value, list) else _wrong_type(key, value)
    if key.type == "string":
        return Reading(value) if isinstance(value, str) else _wrong_type(key, value)
    if key.type == "boolean":
        return _read_boolean(key, value)
    return _number(key, value)


def json_text(value: Any) -> str:
    """Return a value as text for a message, in JSON notation and shortened to `LONGEST`."""
    text = {True: "true", False: "false", None: "null"}.get(value) if _is_word(value) else None
    text = text or (f'"{value}"' if isinstance(value, str) else _value_text(value))
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def outside(key: Key, value: Any) -> tuple[str, str] | None:
    """Return why a value of the right type is illegal, and the nearest legal one; None if legal."""
    if key.choices and value is not None and not _is_choice(key, value):
        close = nearest_names(str(value), [str(choice) for choice in key.choices], count=1)
        legal = ", ".join(json_text(choice) for choice in key.choices)
        meant = f"did you mean {close[0]}? " if close and isinstance(value, str) else ""
        return f"{json_text(value)} is not a legal value", f"{meant}one of {legal}"
    for item in value if key.items and isinstance(value, list) else ():
        if item not in key.items:
            return f"{json_text(item)} is not one of {', '.join(key.items)}", "leave it out"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if key.minimum is not None and value < key.minimum:
        return f"{json_text(value)} is below {key.minimum:g}", f"{key.minimum:g} or more"
    if key.above is not None and value <= key.above:
        return f"{json_text(value)} is not above {key.above:g}", f"more than {key.above:g}"
    if key.maximum is not None and value > key.maximum:
        return f"{json_text(value)} is above {key.maximum:g}", f"{key.maximum:g} at most"
    if key.below is not None and value >= key.below:
        return f"{json_text(value)} is not below {key.below:g}", f"less than {key.below:g}"
    return None


def is_number(value: Any) -> bool:
    """Return True for a JSON number; true and false are not numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Return True for a number without a fraction: DeepSpeed's reader converts 4.0 to 4."""
    return is_number(value) and math.isfinite(value) and value == int(value)


def _read_null(key: Key) -> Reading:
    may_be_null = key.null or (not key.checked and not key.is_section and key.default is None)
    if may_be_null or key.type == "any":
        return Reading(None)
    return Reading(None, f"null is not {WORDS[key.type]}", "leave the key out")


def _wrong_type(key: Key, value: Any, hint: str = "") -> Reading:
    return Reading(None, f"{json_text(value)} is not {WORDS[key.type]}", hint)


def _read_boolean(key: Key, value: Any) -> Reading:
    if isinstance(value, bool):
        return Reading(value)
    if is_number(value) and value in (0, 1):
        return Reading(bool(value), hint=f"write {json_text(bool(value))}", is_loose=True)
    word = value.strip().lower() if isinstance(value, str) else ""
    if word not in SWITCHES:
        return _wrong_type(key, value, "true or false")
    hint = f"write {json_text(SWITCHES[word])}"
    if key.checked:
        return Reading(SWITCHES[word], hint=hint, is_loose=True)
    return _wrong_type(key, value, f"{hint}: any text counts as true")


def _number(key: Key, value: Any) -> Reading:
    whole = key.type == "integer"
    if isinstance(value, bool):
        if not key.checked or key.refuses_switch:
            return _wrong_type(key, value)
        return Reading(int(value), hint=f"write {int(value)}", is_loose=True)
    if is_number(value):
        if whole and not is_whole(value):
            return _wrong_type(key, value, f"write {round(value)}" if math.isfinite(value) else "")
        return Reading(int(value) if whole else value)
    if not isinstance(value, str):
        return _wrong_type(key, value)
    number = _parse_number(value)
    if number is None:
        return _wrong_type(key, value)
    plain = int(number) if is_whole(number) else number
    takes_text = key.checked and (bool(INTEGER.fullmatch(value)) or not whole)
    if whole and not is_whole(number):
        return _wrong_type(key, value, f"write {round(number)}")
    if takes_text:
        return Reading(plain, hint=f"write {plain}, without quotes", is_loose=True)
    return _wrong_type(key, value, f"write {plain}, without quotes")


def _parse_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _is_choice(key: Key, value: Any) -> bool:
    if key.any_case and isinstance(value, str):
        return value.lower() in [choice.lower() for choice in key.choices]
    return any(value == choice for choice in key.choices)


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _value_text(value: Any) -> str:
    try:
        return f"{value}"
    except ValueError:  # a whole number of thousands of digits
        return "a very large number"


class Names:
    """Names for a user's own JSON: its keys. `PlanNames` uses config keys for a plan's JSON."""

    def key(self, key: str) -> str:
        """Return the name of a dotted JSON key."""
        return key

    def setting(self, key: str, value: Any) -> str:
        """Return the name of a key with its value."""
        return f"{key}={command_line_text(value)}"

    def fix(self, key: str, value: Any) -> str:
        """Return the setting to write so that a key has a value."""
        return f"{key}={command_line_text(value)}"

    def stages(self, count: int) -> str:
        """Return a number of pipeline stages in words; the JSON has no key for it."""
        return f"{count} pipeline stage{'s' if count > 1 else ''}"


def command_line_text(value: Any) -> str:
    """Return a value as it is written on the command line: text without quotes."""
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json_text(value)


AUTO = "auto"
FP32 = ("fp32", "float32", "float")
HF_AUTO_KEYS = frozenset(
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
"""Keys whose "auto" transformers' Trainer or accelerate replaces before DeepSpeed reads it."""

LITERAL_AUTO_KEYS = frozenset(
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
"""Keys for which "auto" is a legal value of DeepSpeed. Inside a checked section DeepSpeed drops it
like any other "auto" and uses the default, which is the same.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonContext:
    """Known facts about the use of a JSON; None where unknown."""

    world_size: int | None = None
    """Number of ranks."""
    data_parallel_size: int | None = None
    """Data-parallel size of the script's own mpu; None without one (DeepSpeed counts ranks)."""
    devices_per_node: int | None = None
    """Number of ranks per node."""
    accelerator: Accelerator | None = None
    pipeline_stages: int = 1
    """Number of stages of the script's PipelineModule; 1 without one."""
    has_optimizer: bool | None = None
    """Whether the script passes its own optimizer."""
    fills_auto: bool = False
    """Whether transformers or accelerate fill in "auto"."""
    trainctl_trainer: bool = False
    """Whether trainctl's trainer uses the JSON; it corrects some of DeepSpeed's behaviour."""
    model: ModelConfig | None = None
    """Shape of the model."""


@dataclass(frozen=True)
class Case:
    """DeepSpeed JSON as DeepSpeed will interpret it."""

    json: Mapping[str, Any]
    around: JsonContext = field(default_factory=JsonContext)
    schema: Schema = field(default_factory=load)
    """Schema of the DeepSpeed version that reads the JSON."""
    names: Names = field(default_factory=Names)
    """Names of keys and settings in messages."""

    @cached_property
    def values(self) -> dict[str, Any]:
        """Every value by dotted key, with alternative spellings and deprecated keys resolved.

        A value is None if DeepSpeed cannot read it, or if transformers or accelerate will fill it
        in: no rule can judge it.
        """
        found: dict[str, Any] = {}
        for path, value, key in self.entries():
            if key is None:
                continue
            name = key.same_as or key.name
            if self.is_filled(path, value):
                found[name] = None
            elif value == AUTO and key.name not in LITERAL_AUTO_KEYS and key.checked:
                continue  # dropped: the default holds
            else:
                found[name] = read_value(key, value).value
        self._take_over(found)
        return found

    def entries(self) -> Iterator[tuple[Path, Any, Key | None]]:
        """Yield every key at every depth, with its value and its schema entry.

        Free-form sections, and values under an unknown key, are not entered.
        """
        yield from self._entries(self.json, ())

    def get(self, name: str) -> Any:
        """Return the value in force: given, otherwise DeepSpeed's default; None if unknown."""
        if name in self.values:
            return self.values[name]
        key = self.schema.keys[name]
        return key.default

    def setting(self, name: str) -> str:
        """Return a key with its value in force, in the words of `names`."""
        return self.names.setting(name, self.get(name))

    def given(self, name: str) -> bool:
        """Return True if the JSON has the key, under any of its names, with a known value."""
        return self.values.get(name) is not None

    def has(self, name: str) -> bool:
        """Return True if the JSON has the key, even if its value is unknown."""
        return name in self.values

    def is_filled(self, path: Path, value: Any) -> bool:
        """Return True if the value is an "auto" that transformers or accelerate will replace."""
        return self.around.fills_auto and value == AUTO and ".".join(path) in HF_AUTO_KEYS

    def params(self, section: str) -> Mapping[str, Any]:
        """Return `optimizer.params` or `scheduler.params`, without "auto" that will be filled
        in.
        """
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
        """ZeRO stage; None if unknown or not legal."""
        if isinstance(self.json.get("zero_optimization"), bool):
            return int(self.json["zero_optimization"])
        stage = self.get("zero_optimization.stage")
        return stage if stage in (0, 1, 2, 3) else None

    @property
    def offload_device(self) -> str:
        """Device of the optimizer's states: none, cpu or nvme."""
        return str(self.get("zero_optimization.offload_optimizer.device") or "none")

    @property
    def parameter_device(self) -> str:
        """Device of the parameters: none, cpu or nvme."""
        return str(self.get("zero_optimization.offload_param.device") or "none")

    @property
    def is_offloaded(self) -> bool:
        return self.offload_device != "none"

    @property
    def weights(self) -> str | None:
        """Number format of the weights: fp16, bf16 or fp32; None if another program decides it."""
        fp16, bf16 = self.get("fp16.enabled"), self.get("bf16.enabled")
        if fp16 is None or bf16 is None:
            return None
        return "fp16" if fp16 else "bf16" if bf16 else "fp32"

    @property
    def is_bf16_optimizer(self) -> bool:
        """Whether stage 1 runs runtime/bf16_optimizer.py, which supports less than the others.

        DeepSpeed uses it for bf16 weights with fp32 gradient accumulation, without offload to the
        host.
        """
        sums = self.get("data_types.grad_accum_dtype")
        is_wide = isinstance(sums, str) and sums.removeprefix("torch.") in FP32
        is_bf16 = self.weights == "bf16" and is_wide
        return self.stage == 1 and is_bf16 and self.offload_device != "cpu"

    @property
    def optimizer(self) -> str | None:
        """Name of the optimizer, in lower case if it is DeepSpeed's own; None if unknown."""
        name = self.get("optimizer.type")
        if not isinstance(name, str):
            return None
        return name.lower() if name.lower() in self.schema.optimizers else name

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are known to be CPUs."""
        return self.around.accelerator is Accelerator.cpu

    @property
    def is_not_cuda(self) -> bool:
        """Whether the devices are known not to be NVIDIA's."""
        return self.around.accelerator not in (None, Accelerator.auto, Accelerator.cuda)

    @property
    def tensor_size(self) -> int:
        """Number of AutoTP ranks that split each matrix; 1 without AutoTP."""
        size = self.get("tensor_parallel.autotp_size")
        return size if isinstance(size, int) and size > 1 else 1

    @property
    def counted_ranks(self) -> float | None:
        """Number of ranks that DeepSpeed's batch check multiplies by (runtime/config.py)."""
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
        """Apply the values of deprecated keys to their replacements, as DeepSpeed does."""
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
