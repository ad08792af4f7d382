"""What every rule says of itself and prints for its example, by running it.

An example is what is typed after `trainctl validate` in an empty folder, or a JSON of DeepSpeed's.
Where neither brings a rule about (it needs a machine, a host, weights), its entry says what is
printed, and `tests/test_explanations.py` finds these words in the code.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainctl.cli.deepspeed_file import check_file, json_context
from trainctl.cli.planning import compose_target, plan
from trainctl.config.schema import Accelerator, ModelConfig
from trainctl.errors import Finding, Severity, TrainctlError
from trainctl.explanations.entry import RuleText
from trainctl.explanations.rules import ENTRIES
from trainctl.explanations.shown import ShownRule
from trainctl.rules.deepspeed import RULES as DEEPSPEED_RULES
from trainctl.rules.deepspeed import Enforcement, JsonContext, Rule, check
from trainctl.rules.plan import RULES as PLAN_RULES

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from sampler import BREAKS, around, broken  # noqa: E402

PLAN, READING, DEEPSPEED = (
    f"troubleshooting/{name}"
    for name in ("rules-of-the-plan", "rules-of-reading", "deepspeed-json")
)
"""The pages that rules are on."""

JSON_FILE = "ds_config.json"
PLAIN: dict[str, Any] = {
    "train_batch_size": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
MEETS = {
    Enforcement.refused: "DeepSpeed refuses it too, once every process has started",
    Enforcement.silent: "DeepSpeed says nothing, and does something else than one expects",
    Enforcement.later: "DeepSpeed takes it, and fails later",
}
OTHERS: dict[str, tuple[dict[str, Any], JsonContext, str]] = {
    "TC209": (
        {"train_batch_size": "auto"},
        JsonContext(fills_auto=True),
        "Read by transformers' Trainer, which fills in the value",
    ),
    "TC218": (
        {"tensor_parallel.autotp_size": 3},
        JsonContext(model=ModelConfig(num_attention_heads=4)),
        "With `--model DIR`, a model of 4 attention heads",
    ),
    "TC289": (
        {
            "zero_optimization.stage": 3,
            "zero_optimization.offload_optimizer": {
                "device": "nvme",
                "nvme_path": "/local_nvme",
                "buffer_count": 3,
            },
        },
        JsonContext(world_size=8, accelerator=Accelerator.cuda),
        "Read on 8 GPUs",
    ),
}
"""What the sampler's JSONs do not show: keys on top of a plain one, what it meets, in words too."""
EXIT = "  # exit "
_LONG_TEXT = 400


def shown(known: Mapping[str, ShownRule]) -> dict[str, ShownRule]:
    """Every rule by its identifier.

    Args:
        known: What examples printed before: one that is typed as it was then is not run again.
    """
    titles = {name: _title(rule) for name, rule in PLAN_RULES}
    found = {
        name: _of_entry(name, entry, titles, known.get(name)) for name, entry in ENTRIES.items()
    }
    # `tests/test_explanations.py` asks for what is missing; the tables name every rule meanwhile.
    missing = {name: RuleText("", "") for name in titles if name not in ENTRIES}
    found |= {name: _of_entry(name, text, titles, None) for name, text in missing.items()}
    found |= {rule.identifier: _of_deepspeed(rule) for rule in DEEPSPEED_RULES}
    return dict(sorted(found.items()))


def text(found: Mapping[str, ShownRule]) -> str:
    """What is written to `shown.json`."""
    plain = {name: asdict(each) for name, each in found.items()}
    return json.dumps(plain, indent=1, ensure_ascii=False) + "\n"


def _of_entry(
    name: str, entry: RuleText, titles: Mapping[str, str], before: ShownRule | None
) -> ShownRule:
    severity, typed, printed = "", f"trainctl validate {entry.example}", [entry.message]
    files = {path: _short(content) for path, content in entry.files.items() if content}
    if not entry.example:
        typed = ""
    elif before and (before.typed.partition(EXIT)[0], before.files) == (typed, files):
        severity, typed, printed = before.severity, before.typed, before.printed
    else:
        with _folder(entry.files) as folder:
            found = [each for each in _findings(entry.example) if each.rule == name]
            assert found, f"the example of {name} does not bring it about: {entry.example}"
            severity, printed = found[0].severity.value, _lines(found[:1], folder)
            typed = _typed(typed, found)
    return ShownRule(
        title=(titles.get(name) or entry.title).rstrip("."),
        severity=severity,
        page=PLAN if name in titles else READING,
        cause=entry.cause,
        cure=entry.cure,
        situation=entry.situation,
        typed=typed,
        files=files,
        printed=printed,
    )


def _of_deepspeed(rule: Rule) -> ShownRule:
    if rule.identifier in OTHERS:
        changes, met, situation = OTHERS[rule.identifier]
    else:
        changes = next(changes for name, changes in BREAKS if name == rule.identifier)
        met, situation = None, ""
    case = broken(json.loads(json.dumps(PLAIN)), rule.identifier, changes)
    met = met or around(case)
    written = json.dumps(case["json"], ensure_ascii=False)
    typed, found = "", list[str]()
    for hardware in ("", " hardware=2xcpu"):
        command = f"--deepspeed {JSON_FILE} --world-size 2{hardware}"
        with _folder({JSON_FILE: written}) as folder:
            own = [each for each in _findings(command) if each.rule == rule.identifier]
            if own:
                typed, found = _typed(f"trainctl validate {command}", own), _lines(own[:1], folder)
                break
    if not found:
        own = [each for each in check(case["json"], met) if each.rule == rule.identifier]
        assert own, f"the JSON of {rule.identifier} does not break it: {written}"
        found = _lines(own[:1])
        situation = situation or _in_words(met)
    return ShownRule(
        title=rule.title,
        severity=rule.severity.value,
        page=DEEPSPEED,
        cause=f"{MEETS[rule.meets]} ({rule.file}).",
        cure=rule.fix,
        situation="" if typed else situation,
        typed=typed,
        files={JSON_FILE: written},
        printed=found,
    )


def _in_words(met: JsonContext) -> str:
    stages = f", in {met.pipeline_stages} pipeline stages" if met.pipeline_stages > 1 else ""
    return f"Read by a script of yours on {met.world_size} CPU processes{stages}"


def _findings(typed: str) -> Sequence[Finding]:
    """What `trainctl validate` finds, in this folder."""
    words = shlex.split(typed)
    if words[0] == "--deepspeed":
        file, ranks = Path(words[1]), int(words[3])
        return check_file(file, json_context(words[4:], ranks, None)).findings
    try:
        return plan(compose_target(None, words, None), with_files=True).findings
    except TrainctlError as error:
        return error.findings


def _typed(command: str, found: Sequence[Finding]) -> str:
    """With the exit code that it ends with, where it is refused."""
    errors = [each for each in found if each.severity is Severity.error]
    return f"{command}{EXIT}{int(errors[0].exit_code)}" if errors else command


def _lines(found: Sequence[Finding], folder: Path | None = None) -> list[str]:
    lines = []
    for each in found:
        about = f"{each.key}: " if each.key else ""
        lines.append(f"{each.severity}[{each.rule}]: {about}{each.message}")
        lines += [f"  hint: {each.hint}"] if each.hint else []
    if folder is None:
        return lines
    return [line.replace(f"{folder}/", "").replace(str(folder), "DIR") for line in lines]


def _short(content: str) -> str:
    content = content if len(content) <= _LONG_TEXT else content[:60].rstrip("\n") + "\n..."
    return re.sub(r"[\x00-\x08\x0e-\x1f\x7f]", lambda found: repr(found[0])[1:-1], content)


@contextmanager
def _folder(files: Mapping[str, str]) -> Iterator[Path]:
    """Within it an empty folder with these files is the current one."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content, encoding="utf-8")
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)


def _title(rule: object) -> str:
    """The first sentence of its docstring."""
    line, _, more = (rule.__doc__ or "").strip().partition("\n")
    if line.endswith((".", ")")) or not more:
        return line
    return " ".join([line, *more.split()]).partition(". ")[0]
