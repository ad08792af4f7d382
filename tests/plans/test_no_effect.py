"""A setting that nobody reads in this plan is said so; the table knows every such key."""

from __future__ import annotations

import pytest
from plan_cases import config_with, gpus, keys

from trainctl.config.schema import RunConfig
from trainctl.rules.plan.no_effect import NEEDS
from trainctl.rules.resolve import resolve

FILES = {"data__kind": "files", "data__paths": ["a"]}


def warned_keys(**changes):
    findings = resolve(config_with(**changes), gpus()).findings
    return {finding.key for finding in findings if finding.rule == "TC099"}


def test_the_table_names_keys_of_the_schema_once():
    named = [key for names, _, _ in NEEDS for key in names]
    assert set(named) <= keys(RunConfig())
    assert len(named) == len(set(named))


@pytest.mark.parametrize(
    ("idle", "effective"),
    [
        ({"zero_stage__prefetch_bucket_size": 1}, {"zero_stage__stage": 3}),
        ({"checkpoint__weights_only_keep": 2}, {"checkpoint__weights_only_every_steps": 5}),
        ({"zero_stage__overlap_comm": True, "zero_stage__stage": 0}, {"zero_stage__stage": 1}),
        (
            {
                "precision__min_loss_scale": 2,
                "precision__compute": "fp16",
                "precision__loss_scale": 8.0,
            },
            {"precision__loss_scale": 0.0},
        ),
        ({"offload__nvme_path": "/n"}, {"offload__parameters": "nvme", "zero_stage__stage": 3}),
        ({"offload__pin_memory": False}, {"offload__optimizer": "cpu"}),
        ({"offload__buffer_count": 9}, {"offload__parameters": "nvme", "offload__nvme_path": "/n"}),
        (
            {"offload__zenflow_topk_ratio": 0.2, "offload__optimizer": "cpu"},
            {"offload__zenflow": True},
        ),
        (
            {"zero_stage__allgather_bucket_size": 1000, "zero_stage__stage": 3},
            {"zero_stage__stage": 2},
        ),
        ({"zero_stage__reduce_scatter": False, "zero_stage__stage": 0}, {"zero_stage__stage": 1}),
        (
            {
                "checkpoint__asynchronous": True,
                "offload__optimizer": "nvme",
                "offload__nvme_path": "/n",
                "zero_stage__stage": 3,
            },
            {"offload__optimizer": "cpu"},
        ),
        ({"model__sliding_window": 512}, {"model__family": "mistral"}),
        ({"model__path": "/m"}, {"model__family": "hf"}),
        ({"model__mup_base_width": 64}, {"model__mup": True}),
        (
            {"schedule__warmup_fraction": 0.1, "schedule__warmup_steps": 5},
            {"schedule__warmup_steps": None},
        ),
        (
            {
                "schedule__decay_fraction": 0.5,
                "schedule__decay_tokens": 5000,
                "schedule__kind": "wsd",
            },
            {"schedule__decay_tokens": None},
        ),
        (
            {
                "schedule__decay_tokens": 5000,
                "schedule__decay_steps": 5,
                "schedule__kind": "wsd",
            },
            {"schedule__decay_steps": None},
        ),
        (
            {
                "schedule__step_every": 5,
                "schedule__step_every_tokens": 5000,
                "schedule__unit": "tokens",
                "schedule__kind": "step",
            },
            {"schedule__unit": "steps"},
        ),
        (
            {"schedule__unit": "tokens"},
            {"schedule__kind": "milestones", "schedule__milestones": [3]},
        ),
        (
            {
                "schedule__milestone_fractions": [0.5],
                "schedule__milestones": [3],
                "schedule__kind": "milestones",
            },
            {"schedule__milestones": []},
        ),
        (
            {"data__held_out_fraction": 0.1, "data__held_out_paths": ["b"], **FILES},
            {"data__held_out_paths": []},
        ),
        ({"training__ema_every_steps": 5}, {"training__ema_decay": 0.99}),
        ({"training__sample_prompt": "x"}, {"training__sample_tokens": 5}),
        (
            {"training__stop_min_delta": 0.1},
            {"training__stop_patience": 2, "training__evaluate_every_steps": 5},
        ),
        ({"stability__max_interventions": 1}, {"stability__on_bad_loss": "skip_step"}),
        ({"stability__spike_window": 5}, {"stability__spike_factor": 2.0}),
        ({"stability__spike_after_steps": 5}, {"stability__norm_spike_factor": 2.0}),
        ({"stability__on_bad_loss": "warn"}, {"stability__spike_factor": 2.0}),
        (
            {"gradients__adaptive_percentile": 50.0, "gradients__adaptive_window": 9},
            {"gradients__adaptive_clipping": "percentile"},
        ),
        ({"gradients__adaptive_factor": 2.0}, {"gradients__adaptive_clipping": "mean"}),
        (
            {"optimizer__gradient_clipping": 0.5, "gradients__adaptive_clipping": "percentile"},
            {"gradients__adaptive_clipping": "mean"},
        ),
        ({"optimizer__lr_scaling_batch_size": 8}, {"optimizer__lr_scaling": "sqrt"}),
        ({"stability__on_bad_loss": "warn"}, {"stability__loss_limit": 20.0}),
        (
            {"stability__rewind_lr_factor": 0.5},
            {"stability__on_bad_loss": "rewind", "checkpoint__every_steps": 5},
        ),
        ({"gradients__noise_decay": 1.0}, {"gradients__noise": 0.1}),
        (
            {"training__epochs": 2.0, "training__epoch_tokens": 50_000},
            {"training__steps": None},
        ),
        ({"training__tokens": 5000}, {"training__steps": None}),
        ({"kernels__chunk_tokens": 64}, {"kernels__cross_entropy": "chunked"}),
        ({"logging__profile_ranks": [1]}, {"logging__profile_steps": [2, 3]}),
        ({"gradients__noise": 0.1, "script": "own.py"}, {"script": None}),
        ({"stability__spike_factor": 2.0, "script": "own.py"}, {"script": None}),
        (
            {"launcher__min_nodes": 1, "launcher__kind": "ssh", "launcher__hosts": ["a"]},
            {"launcher__max_restarts": 1},
        ),
        (
            {"launcher__slurm_container_mounts": ["/a:/b"], "launcher__kind": "slurm"},
            {"launcher__slurm_container": "image"},
        ),
    ],
)
def test_a_setting_is_reported_exactly_while_it_does_nothing(idle, effective):
    expected = next(iter(idle)).replace("__", ".")
    assert expected in warned_keys(**idle)
    assert expected not in warned_keys(**{**idle, **effective})
