"""Explanations of all rules with the output of their examples, as their pages show them.

An example is the arguments of `trainctl validate` in an empty folder, or a DeepSpeed JSON. Where
neither can trigger a rule (it needs a certain machine, a host, weights), its text quotes the
message, and `tests/test_explanations.py` finds these words in the code.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainctl.errors import Finding, Severity, TrainctlError
from trainctl.hardware import resolve_hardware
from trainctl.launchers.planning import compose_config, compose_target, plan_config
from trainctl.rules.deepspeed.case import Case, JsonContext
from trainctl.rules.handbook import (
    JSON_PAGE,
    PLAN_PAGE,
    READING_PAGE,
    RULE,
    Meaning,
    all_meanings,
)
from trainctl.rules.resolve import JSON_RULES, PLAN_RULES, check_file, check_json, json_context
from trainctl.rules.rule import Rule

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from sampler import around, broken  # noqa: E402

JSON_FILE = "ds_config.json"
PLAIN: dict[str, Any] = {
    "train_batch_size": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
LONG = {
    "TC138": {"a.txt": "\x7fELF" + "\x00" * 9000},
    "TC139": {"a.jsonl": '{"content": "some text"}\n' * 900},
    "TC140": {"texts/a.rst": "Some text.\n" * 2000},
    "TC142": {"a.jsonl": '{"text": "whole"}\n{"text": "cut off\n' + '{"text": "whole"}\n' * 900},
    "TC359": {f"src/{name}.py": "print('hello')\n" * 900 for name in "abcd"},
}
"""Example files that the page shows shortened."""

EXIT = "  # exit "
_LONG_TEXT = 400


def meanings(*, all_again: bool) -> dict[str, Meaning]:
    """Return the explanation of every rule by its code.

    The earlier output of an unchanged example is kept unless `all_again` is set.
    """
    known = {each.word: each for each in all_meanings() if each.kind.startswith(RULE)}
    before = {} if all_again else known
    explanations = {rule.code: _of_json(rule) for rule in JSON_RULES}
    for rule in PLAN_RULES:
        shown, code = rule.example, rule.code
        explanation = Meaning(
            word=code,
            kind=RULE,
            page=PLAN_PAGE,
            meaning=rule.title,
            cause=rule.cause,
            cure=rule.fix,
            situation=shown.situation,
            typed=f"trainctl validate {shown.arguments}" if shown.arguments else "",
            files={path: _short(content) for path, content in shown.files.items() if content},
            printed=() if shown.arguments else (shown.message,),
        )
        explanations[code] = _with_output(explanation, shown.files, before.get(code))
    for code, each in known.items():
        if each.page == READING_PAGE:
            explanations[code] = _with_output(each, LONG.get(code) or each.files, before.get(code))
    return dict(sorted(explanations.items()))


def _with_output(explanation: Meaning, files: Mapping[str, str], before: Meaning | None) -> Meaning:
    """Return the explanation with the output and exit code of its example.

    Args:
        files: Files of the example with their whole content.
        before: The explanation on its page, if its output may be reused.
    """
    typed = explanation.typed.partition(EXIT)[0]
    if not typed:
        return explanation
    if before and (before.typed.partition(EXIT)[0], before.files) == (typed, explanation.files):
        return replace(
            explanation, severity=before.severity, typed=before.typed, printed=before.printed
        )
    with _folder(files) as folder:
        command = typed.removeprefix("trainctl validate ")
        findings = [each for each in _findings(command) if each.rule == explanation.word]
        assert findings, f"the example of {explanation.word} does not bring it about: {typed}"
        printed = tuple(_lines(findings[:1], folder))
        severity = findings[0].severity.value
        return replace(
            explanation, severity=severity, typed=_typed(typed, findings), printed=printed
        )


def _of_json(rule: Rule[Case]) -> Meaning:
    shown = rule.example
    case = broken(json.loads(json.dumps(PLAIN)), rule.code, shown.json)
    met = shown.around or around(case)
    written = json.dumps(case["json"], ensure_ascii=False)
    typed, printed = "", list[str]()
    for hardware in ("", " hardware=2xcpu"):
        command = f"--deepspeed {JSON_FILE} --world-size 2{hardware}"
        with _folder({JSON_FILE: written}) as folder:
            own = [each for each in _findings(command) if each.rule == rule.code]
            if own:
                typed = _typed(f"trainctl validate {command}", own)
                printed = _lines(own[:1], folder)
                break
    if not printed:
        own = [each for each in check_json(case["json"], met) if each.rule == rule.code]
        assert own, f"the JSON of {rule.code} does not break it: {written}"
        printed = _lines(own[:1])
    return Meaning(
        word=rule.code,
        kind=RULE,
        page=JSON_PAGE,
        meaning=rule.title,
        severity=rule.severity.value,
        cause=rule.cause,
        cure=rule.fix,
        situation="" if typed else shown.situation or _in_words(met),
        typed=typed,
        files={JSON_FILE: written},
        printed=tuple(printed),
    )


def _in_words(met: JsonContext) -> str:
    stages = f", in {met.pipeline_stages} pipeline stages" if met.pipeline_stages > 1 else ""
    return f"Read by a script of yours on {met.world_size} CPU processes{stages}"


def _findings(typed: str) -> Sequence[Finding]:
    """Return the findings of `trainctl validate` in the current folder."""
    words = shlex.split(typed)
    if words[0] == "--deepspeed":
        file, ranks = Path(words[1]), int(words[3])
        chosen = words[4:]
        hardware = (
            resolve_hardware(compose_config(chosen, None).config.hardware) if chosen else None
        )
        return check_file(file, json_context(hardware, ranks, None)).findings
    try:
        return plan_config(compose_target(None, words, None), with_files=True).findings
    except TrainctlError as error:
        return error.findings


def _typed(command: str, findings: Sequence[Finding]) -> str:
    """Return the output of the example, with the exit code if it is refused."""
    errors = [each for each in findings if each.severity is Severity.error]
    return f"{command}{EXIT}{int(errors[0].exit_code)}" if errors else command


def _lines(findings: Sequence[Finding], folder: Path | None = None) -> list[str]:
    lines = []
    for each in findings:
        about = f"{each.key}: " if each.key else ""
        lines.append(f"{each.severity}[{each.rule}]: {about}{each.message}")
        lines += [f"  hint: {each.hint}"] if each.hint else []
    if folder is None:
        return lines
    return [line.replace(f"{folder}/", "").replace(str(folder), "DIR") for line in lines]


def _short(content: str) -> str:
    content = content if len(content) <= _LONG_TEXT else content[:60].rstrip("\n") + "\n..."
    return re.sub(r"[\x00-\x08\x0e-\x1f\x7f]", lambda match: repr(match[0])[1:-1], content)


@contextmanager
def _folder(files: Mapping[str, str]) -> Iterator[Path]:
    """Change into a new folder with these files for the duration of the context."""
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
