"""Check and import every DeepSpeed JSON of a folder, and compare with the real DeepSpeedConfig.

    python scripts/check_deepspeed_files.py FOLDER [--quiet]

Each file is checked as `trainctl validate --deepspeed` does, imported as `trainctl config import`
does, planned for an 8B model on as many GPUs as the file is written for, and loaded by DeepSpeed's
own `DeepSpeedConfig` in a child process whose process group only claims to have these ranks.
DeepSpeed cannot read "auto", so it gets `FILLED`: the values that the transformers Trainer writes
for default arguments.

Where the two disagree, the rule that found the error explains it: DeepSpeed accepts such a file
silently, fails on it later, or refuses it only when the engine is built. Any other disagreement is
UNEXPLAINED and makes the exit code 1. A table counts the files of each project (a subfolder of
FOLDER). `--quiet` prints only the table and the unexplained disagreements.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from trainctl.config.codec import flatten, nest
from trainctl.config.compose import compose
from trainctl.config.json_file import read_json
from trainctl.config.schema import Accelerator
from trainctl.errors import Finding, TrainctlError
from trainctl.hardware import resolve_hardware
from trainctl.migration.configs.import_json import BATCH, ImportResult, import_json, world_size_of
from trainctl.rules.deepspeed.case import AUTO, HF_AUTO_KEYS, JsonContext
from trainctl.rules.resolve import JSON_RULES, CheckedFile, check_file, check_json, resolve
from trainctl.rules.rule import Enforcement

TOGETHER = 50
"""Files loaded by one child process: importing DeepSpeed takes a child some seconds."""

FILLED: Mapping[str, Any] = {
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 5e-5,
    "scheduler.params.warmup_num_steps": 0,
    "scheduler.params.total_num_steps": 1000,
    "fp16.enabled": False,
    "bf16.enabled": False,
    "zero_optimization.stage": 2,
    "zero_optimization.reduce_bucket_size": 4096 * 4096,
    "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * 4096 * 4096),
    "zero_optimization.stage3_param_persistence_threshold": 10 * 4096,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.offload_optimizer.nvme_path": None,
    "zero_optimization.offload_param.device": "none",
    "zero_optimization.offload_param.nvme_path": None,
}
"""Values that the Trainer and accelerate write for "auto", except the batch sizes; for a model of
width 4,096.
"""

AT_LOADING = (
    "runtime/config.py",
    "runtime/config_utils.py",
    "runtime/precision_config.py",
    "runtime/zero/config.py",
)
"""DeepSpeed files that have run once a DeepSpeedConfig exists; all others run in the engine."""

BY_ID = {rule.code: rule for rule in JSON_RULES}


@dataclass(frozen=True, kw_only=True)
class Report:
    """Outcome of checking one file."""

    path: Path
    """Path relative to the folder."""
    ranks: int
    """World size that the file was checked with."""
    checked: CheckedFile
    """Findings of `validate --deepspeed`."""
    imported: ImportResult | None
    """Result of `config import`; None if the import is refused."""
    why_not: str
    """Reason why the import is refused."""
    plan_errors: tuple[Finding, ...]
    """Errors of the plan of the imported configuration."""

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.checked.findings if finding.is_error]

    def disagreement(self, answer: str) -> tuple[str, bool]:
        """Describe how trainctl and DeepSpeed differ, and whether a rule explains it; empty if they
        agree.

        Args:
            answer: DeepSpeed's refusal; empty if it accepts the file.
        """
        if bool(answer) is bool(self.errors):
            return "", True
        if answer:
            here = JsonContext(world_size=self.ranks, accelerator=Accelerator.cpu, fills_auto=True)
            findings = check_json(self.checked.document.value, here, self.checked.schema)
            rules = dict.fromkeys(finding.rule for finding in findings if finding.is_error)
            if rules:
                return f"the child has no GPU: {', '.join(rules)}", True
            return "DeepSpeed refuses what the checker passes", False
        reasons = {finding.rule: _taken_because(finding.rule) for finding in self.errors}
        if any(reason is None for reason in reasons.values()):
            return "DeepSpeed takes what the checker says that it refuses", False
        explanations = [f"{rule} {reason}" for rule, reason in reasons.items()]
        return f"DeepSpeedConfig takes it: {'; '.join(explanations)}", True


def _taken_because(identifier: str) -> str | None:
    """Return why DeepSpeedConfig accepts a file with this error; None if it should refuse it."""
    rule = BY_ID.get(identifier)
    if rule is None:  # DeepSpeed's reader accepts more than JSON
        return "is about what other readers of JSON refuse"
    if rule.meets is Enforcement.silent:
        return "is accepted silently, and does otherwise"
    if rule.meets is Enforcement.later:
        return "fails later"
    later = [file for file in rule.file.split(", ") if file not in AT_LOADING]
    return f"is refused when the engine is built ({', '.join(later)})" if later else None


def report_on(path: Path, folder: Path) -> Report:
    """Check, import and plan one file."""
    document = read_json(path)
    ranks = world_size_of(document.value)
    checked = check_file(path, JsonContext(world_size=ranks, fills_auto=True))
    imported, why_not, plan_errors = None, "", ()
    if checked.has_error:
        why_not = "the check finds errors"
    else:
        try:
            imported = import_json(document.value, world_size=ranks)
            plan_errors = tuple(_plan_errors(imported, ranks))
        except TrainctlError as error:
            why_not = " ".join([error.message, *(each.message for each in error.findings)])
    return Report(
        path=path.relative_to(folder),
        ranks=ranks,
        checked=checked,
        imported=imported,
        why_not=why_not,
        plan_errors=plan_errors,
    )


def _plan_errors(imported: ImportResult, ranks: int) -> Iterator[Finding]:
    run = ["model=llama-8b", f"hardware={ranks}xh100-80g", "training.steps=1000"]
    config = compose([*run, *imported.overrides]).config
    findings = resolve(config, resolve_hardware(config.hardware)).findings
    yield from (finding for finding in findings if finding.is_error)


def filled(json: Mapping[str, Any], *, ranks: int) -> dict[str, Any]:
    """Return the JSON with "auto" replaced by the values that the Trainer writes."""
    micro, steps = (1 if json.get(name) in (None, AUTO) else json.get(name) for name in BATCH[1:])
    batch = dict(zip(BATCH[1:], (micro, steps), strict=True))
    if isinstance(micro, int) and isinstance(steps, int):
        batch[BATCH[0]] = micro * steps * ranks
    values = []
    for key, value in flatten(json):
        is_open = value == AUTO and key in HF_AUTO_KEYS
        values.append((key, {**FILLED, **batch}.get(key, value) if is_open else value))
    return nest(values)


def answers(reports: Sequence[Report], folder: Path) -> Iterator[str]:
    """Return DeepSpeed's refusal of each file; empty for an accepted file."""
    waiting = [_request(report, folder) for report in reports]
    while waiting:
        batch = _ask(waiting[:TOGETHER])
        yield from batch
        del waiting[: len(batch)]


def _request(report: Report, folder: Path) -> str:
    path, ranks = folder / report.path, report.ranks
    document = report.checked.document
    has_auto = any(value == AUTO for _, value in flatten(document.value))
    json_or_path = filled(document.value, ranks=ranks) if has_auto else str(path)
    return json.dumps({"config": json_or_path, "ranks": ranks})


def _ask(requests: Sequence[str]) -> list[str]:
    """Return the answers of one child process; if the child died, the last answer says so."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--load"],
        input="\n".join(requests),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    if len(replies) < len(requests):
        replies.append(f"the process died with {done.returncode}: {done.stderr[-300:].strip()}")
    return replies


def load() -> None:
    """Answer requests on standard input, one per line; runs in the child process."""
    output, sys.stdout = sys.stdout, sys.stderr  # DeepSpeed prints to stdout
    import deepspeed
    import torch.distributed
    from deepspeed.comm import comm
    from deepspeed.comm.torch import TorchBackend
    from deepspeed.runtime.config import DeepSpeedConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # DeepSpeed would first compile its shared-memory all-reduce; nothing is communicated here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for line in sys.stdin:
        request = json.loads(line)
        torch.distributed.init_process_group(
            "fake", store=FakeStore(), rank=0, world_size=request["ranks"]
        )
        comm.cdb = TorchBackend("fake", timedelta(seconds=60), None)
        answer = ""
        try:
            DeepSpeedConfig(request["config"])
        except Exception as error:  # any exception is a refusal, and is the answer
            answer = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        torch.distributed.destroy_process_group()
        comm.cdb = None
        output.write(json.dumps(answer) + "\n")
        output.flush()


def lines_on(report: Report, answer: str) -> Iterator[str]:
    """Format the report of one file."""
    rank = "rank" if report.ranks == 1 else "ranks"
    yield f"{report.path} ({report.ranks} {rank})"
    warnings = Counter(each.rule for each in report.checked.findings if not each.is_error)
    names = f" with {', '.join(warnings)}" if warnings else ""
    yield f"  checked: {'refused' if report.errors else f'valid{names}'}"
    for finding in report.errors:
        yield f"    {finding.rule} {finding.key}: {finding.message}"
    imported = report.imported
    if imported is None:
        yield f"  imported: refused: {report.why_not}"
    else:
        yield f"  imported: {len(imported.overrides)} overrides"
        for dropped in imported.left_out:
            yield f"    left out: {dropped.key}: {dropped.reason}"
        for finding in report.plan_errors:
            yield f"    no plan: {finding.rule} {finding.key}: {finding.message}"
    yield f"  DeepSpeedConfig: {f'refuses it: {answer}' if answer else 'takes it'}"
    difference, is_explained = report.disagreement(answer)
    if difference:
        yield f"  {'explained' if is_explained else 'UNEXPLAINED'}: {difference}"


COLUMNS = ("files", "valid", "refused", "imported", "planned", "taken", "explained", "unexplained")


def table(reports: Sequence[Report], refusals: Sequence[str]) -> Iterator[str]:
    """Count the files of each project, and of all projects, by outcome."""
    counts: dict[str, Counter[str]] = {}
    for report, answer in zip(reports, refusals, strict=True):
        difference, is_explained = report.disagreement(answer)
        outcomes = {
            "files": True,
            "valid": not report.errors,
            "refused": bool(report.errors),
            "imported": report.imported is not None,
            "planned": report.imported is not None and not report.plan_errors,
            "taken": not answer,
            "explained": bool(difference) and is_explained,
            "unexplained": not is_explained,
        }
        for name in (report.path.parts[0] if len(report.path.parts) > 1 else ".", "all"):
            counts.setdefault(name, Counter()).update(
                {key: int(is_so) for key, is_so in outcomes.items()}
            )
    width = max(len(name) for name in counts)
    yield "  ".join([" " * width, *COLUMNS])
    for name in sorted(counts, key=lambda name: (name == "all", name)):
        cells = (f"{counts[name][column]:>{len(column)}}" for column in COLUMNS)
        yield "  ".join([f"{name:<{width}}", *cells])


def main(arguments: Sequence[str]) -> int:
    """Print the report of a folder; the exit code is 1 if a disagreement is unexplained."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args(arguments)
    paths = sorted(options.folder.rglob("*.json"))
    if not paths:
        parser.error(f"{options.folder} has no JSON files")
    reports = [report_on(path, options.folder) for path in paths]
    refusals = list(answers(reports, options.folder))
    agree = True
    for report, answer in zip(reports, refusals, strict=True):
        _, is_explained = report.disagreement(answer)
        agree &= is_explained
        if not (options.quiet and is_explained):
            print("\n".join(lines_on(report, answer)))
    print("\n".join(table(reports, refusals)))
    return 0 if agree else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["--load"]:
        load()
    else:
        sys.exit(main(sys.argv[1:]))
