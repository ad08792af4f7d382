"""A plan's own JSON goes through the rules over DeepSpeed's JSON."""

from __future__ import annotations

from plan_cases import config_with, cpus, gpus

from trainctl.errors import Severity
from trainctl.rules.resolve import resolve


def test_what_is_passed_through_must_be_legal_with_what_is_derived():
    section = {"prescale_gradients": True}
    resolution = resolve(config_with(zero_stage__stage=2, deepspeed=section), gpus(8))
    assert resolution.plan is None
    (finding,) = resolution.findings
    assert (finding.rule, finding.key) == ("TC275", "deepspeed.prescale_gradients")
    assert resolve(config_with(zero_stage__stage=1, deepspeed=section), gpus(8)).findings == ()


def test_a_warning_about_what_is_passed_through_is_shown():
    section = {"zero_optimization": {"elastic_checkpoint": True}}
    config = config_with(zero_stage__stage=3, script="train.py", deepspeed=section)
    resolution = resolve(config, gpus(8))
    assert resolution.plan is not None
    (finding,) = resolution.findings
    assert finding.rule == "TC285" and finding.severity is Severity.warning
    assert finding.key == "deepspeed.zero_optimization.elastic_checkpoint"


def test_an_error_in_what_trainctl_writes_names_the_key_that_it_comes_from():
    changes = {"zero_stage__stage": 3, "offload__optimizer": "cpu", "offload__zenflow": True}
    config = config_with(script="train.py", **changes)
    (finding,) = [each for each in resolve(config, cpus(2)).findings if each.is_error]
    assert (finding.rule, finding.key) == ("TC247", "offload.zenflow_topk_ratio")
    assert [each for each in resolve(config, gpus(2)).findings if each.is_error] == []


def test_what_the_trainer_puts_right_is_an_error_for_another_program():
    changes = {
        "zero_stage__stage": 2,
        "offload__optimizer": "cpu",
        "offload__zenflow": True,
        "optimizer__gradient_clipping": 0.0,
    }
    assert resolve(config_with(**changes), gpus(2)).findings == ()
    findings = resolve(config_with(script="train.py", **changes), gpus(2)).findings
    (finding,) = [each for each in findings if each.is_error]
    assert finding.rule == "TC249" and "scrambles" in finding.message


def test_a_rule_over_the_json_speaks_of_what_was_typed():
    changes = {"zero_stage__stage": 2, "offload__parameters": "nvme"}
    found = {each.key: each for each in resolve(config_with(**changes), gpus(2)).findings}
    assert set(found) == {"offload.parameters", "offload.nvme_path"}
    stage, path = found["offload.parameters"], found["offload.nvme_path"]
    assert (stage.rule, path.rule) == ("TC032", "TC033")
    assert stage.message.startswith("offload.parameters=nvme needs ZeRO stage 3, and it is 2")
    assert stage.hint == "zero_stage=3, or offload.parameters=none"
    assert path.hint == "offload.nvme_path=/local_nvme"


def test_a_rule_over_the_json_speaks_once_of_a_key_that_is_two_in_the_json():
    changes = {"offload__parameters": "nvme", "offload__optimizer": "nvme"}
    findings = resolve(config_with(zero_stage__stage=3, **changes), gpus(2)).findings
    assert [finding.key for finding in findings] == ["offload.nvme_path"]


def test_what_is_passed_through_is_named_where_it_was_typed():
    section = {"zero_optimization": {"zero_quantized_nontrainable_weights": True}}
    config = config_with(zero_stage__stage=3, script="train.py", deepspeed=section)
    found = [each for each in resolve(config, cpus(2)).findings if each.is_error]
    key = "deepspeed.zero_optimization.zero_quantized_nontrainable_weights"
    assert [(each.rule, each.key) for each in found] == [("TC281", key)]
    assert found[0].message.startswith(f"{key} uses GPU kernels")
    assert found[0].hint == f"{key}=false"


def test_what_is_passed_through_as_it_is_derived_is_still_named_as_typed():
    section = {"zero_optimization": {"stage": 2}}
    changes = {"zero_stage__stage": 2, "parallelism__pipeline": 2, "deepspeed": section}
    findings = resolve(config_with(**changes), gpus(2)).findings
    assert ("TC030", "zero_stage.stage") in [(each.rule, each.key) for each in findings]
