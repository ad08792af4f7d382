"""Resolution and budget in one: what does not fit is a finding with its own exit code."""

from __future__ import annotations

from dataclasses import replace

from trainctl.config.schema import Accelerator, ModelConfig, OffloadDevice, RunConfig
from trainctl.errors import ExitCode, Severity
from trainctl.hardware import Hardware
from trainctl.tuning.assess import assess

GIB = 2**30
H100 = Hardware(
    name="8xh100-80g",
    accelerator=Accelerator.cuda,
    nodes=1,
    devices_per_node=8,
    device_memory_bytes=80 * GIB,
    host_memory_bytes=1000 * GIB,
)


def llama_7b(**zero: int) -> RunConfig:
    config = RunConfig(
        model=ModelConfig(
            name="llama-7b",
            vocab_size=32_000,
            hidden_size=4096,
            intermediate_size=11_008,
            num_layers=32,
            num_attention_heads=32,
            max_position_embeddings=4096,
        )
    )
    config.training.steps = 10
    config.zero_stage = replace(config.zero_stage, **zero)
    return config


def rules(config: RunConfig, hardware: Hardware) -> dict[str, ExitCode]:
    findings = assess(config, hardware).findings
    return {finding.rule: finding.exit_code for finding in findings if finding.is_error}


def test_a_plan_that_fits_has_no_findings_of_memory() -> None:
    result = assess(llama_7b(stage=3), H100)
    assert result.fits
    assert not [finding for finding in result.findings if finding.rule >= "TC150"]


def test_a_device_too_small_is_an_error_with_exit_code_3() -> None:
    small = replace(H100, device_memory_bytes=16 * GIB)
    assert rules(llama_7b(stage=3), small) == {"TC150": ExitCode.does_not_fit}


def test_a_capacity_inside_the_band_is_a_warning() -> None:
    peak = assess(llama_7b(stage=3), H100).budget
    assert peak is not None
    result = assess(llama_7b(stage=3), replace(H100, device_memory_bytes=peak.device_peak_bytes))
    (finding,) = [finding for finding in result.findings if finding.rule == "TC150"]
    assert finding.severity is Severity.warning
    assert "may not fit" in finding.message
    assert not result.fits


def test_a_host_too_small_names_its_parts() -> None:
    config = llama_7b(stage=3)
    config.offload.optimizer = OffloadDevice.cpu
    result = assess(config, replace(H100, host_memory_bytes=64 * GIB))
    (finding,) = [finding for finding in result.findings if finding.is_error]
    assert (finding.rule, finding.exit_code) == ("TC151", ExitCode.does_not_fit)
    assert "optimizer_states" in finding.message


def test_an_nvme_too_small_is_an_error() -> None:
    config = llama_7b(stage=3)
    config.offload.optimizer = OffloadDevice.nvme
    config.offload.nvme_path = "/local_nvme"
    assert "TC152" in rules(config, replace(H100, nvme_bytes=GIB))


def test_unknown_sizes_are_not_checked() -> None:
    unknown = replace(H100, device_memory_bytes=None, host_memory_bytes=None)
    assert not rules(llama_7b(stage=0), unknown)


def test_an_illegal_configuration_has_no_budget() -> None:
    config = llama_7b(stage=3)
    config.parallelism.tensor = 3
    result = assess(config, H100)
    assert result.plan is None
    assert result.budget is None
    assert not result.fits
