"""Write docs/rules.md from every rule; `--check` only compares."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from trainctl.plan.deepspeed_rules import RULES as DEEPSPEED_RULES
from trainctl.plan.deepspeed_schema import load
from trainctl.plan.rules import RULES as PLAN_RULES

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "rules.md"
MATRIX = ROOT / "tests" / "deepspeed_check" / "confusion_matrix.json"
INTRODUCTION = """\
# What is checked
Written by `make docs` from the rules themselves; do not edit it by hand.

Every finding names its rule. `TC0xx` look at trainctl's configuration and the plan made of it,
`TC1xx` at how it is written and at this machine, `TC2xx` at DeepSpeed's own JSON: a file given to
`trainctl validate --deepspeed`, and the JSON of every plan, with what `deepspeed.*` passes through.
"""

FOUND_ELSEWHERE = {
    "TC045": "A run's `config.yaml` that was edited by hand, and that nobody reads any more.",
    "TC046": "Attempts that failed before their first step: what they changed is left out.",
    "TC100": "An override that uses another name for a key.",
    "TC101": "A key that the schema does not have.",
    "TC102": "A value that is not of its key's type.",
    "TC103": "A number outside its key's range.",
    "TC104": "A construct of Hydra's that is refused, such as `_target_`.",
    "TC105": "A YAML file that cannot be read.",
    "TC106": "A file of the user's that hides another of the same name.",
    "TC107": "A file that is not read, for its ending.",
    "TC108": "An option that its group does not have.",
    "TC109": "A recipe that does not exist.",
    "TC110": "An override that does not follow their grammar.",
    "TC111": "An override that a later one replaces.",
    "TC112": "A setting without effect, for what the model's directory says.",
    "TC113": "A model's directory that cannot be read.",
    "TC114": "A model's directory that does not give its shape.",
    "TC115": "A file that the configuration names and that is not there.",
    "TC116": "A script of the user's that is not there.",
    "TC117": "A function of the user's that cannot be found.",
    "TC118": "Settings of a script or a function of the user's that do not go together.",
    "TC119": "A setting that a script or a function of the user's has to apply itself.",
    "TC120": "The plan is for another kind of device than this machine has.",
    "TC121": "The plan is for more devices than this machine has.",
    "TC122": "The plan is for devices with more memory than this machine's.",
    "TC123": "More processes than cores.",
    "TC124": "A package that is not installed.",
    "TC125": "Versions of packages that do not go together.",
    "TC126": "An op has to be compiled, and a tool for it is missing.",
    "TC127": "libaio is missing, and async_io needs it.",
    "TC128": "The CUDA toolkit is missing, or not of torch's version.",
    "TC129": "/dev/shm is missing or too small.",
    "TC130": "Too little memory can be locked (`ulimit -l`).",
    "TC131": "The container or machine allows less host memory than the plan is for.",
    "TC132": "The folder for NVMe is missing, does not work, or is not on a local drive.",
    "TC133": "A variable shows other devices than the plan is for.",
    "TC134": "A device that does not compute in the plan's format.",
    "TC135": "A network interface that is not there or not up.",
    "TC136": "A package or compiler that a kernel of the plan needs is missing.",
    "TC137": "The lock of a killed build, which would hold up the run for ever.",
    "TC138": "A file of the corpus that is not of its kind, cut off or damaged: it is not read.",
    "TC139": "A file without a text under `data.text_key`: in its first lines, or no such column.",
    "TC140": "A folder of the corpus without a text, or with files that are left out.",
    "TC141": "A side of the corpus without a sample, or with much more text than was asked for.",
    "TC142": "Text at the beginning of a file that is not UTF-8, or a line that is not JSON.",
    "TC145": "A model's directory without weights that can be read, where they are asked for.",
    "TC146": "A key of the model that its directory decides, and that would not be applied.",
    "TC147": "A model that has no closed form and cannot be traced.",
    "TC148": "Weights of a directory that are not those of its model.",
    "TC149": "Weights of a directory that its model has no place for.",
    "TC150": "The plan does not fit into a device's memory.",
    "TC151": "The plan does not fit into a node's memory.",
    "TC152": "The plan does not fit onto a node's NVMe.",
    "TC154": "A tokenizer without a token that ends a document: they follow each other unmarked.",
    "TC156": "A tokenizer's file that is malformed.",
    "TC157": "A tokenizer whose ids are not those of the model.",
    "TC158": "A global batch that the ranks of no layout can share, of those that are searched.",
    "TC159": "No layout of a model fits the hardware, as far as `trainctl plan` searches.",
    "TC160": "A word of a scheduler's option that is not plain.",
    "TC161": "A path that a scheduler's script could not carry.",
    "TC162": "mpirun, or the program that launcher.mpi_* names, is missing.",
    "TC163": "Fewer hosts in the MPI hostfile than the plan has nodes.",
    "TC164": "Kubernetes without an image.",
    "TC165": "A run directory that no volume of the pods holds.",
    "TC166": "A name that Kubernetes does not take.",
    "TC167": "A value that may be a secret, and that the run would write.",
    "TC168": "A variable that the configuration refers to, and that a start would not find.",
    "TC169": "Hosts that come twice, or a file of hosts that ssh's launcher cannot use.",
    "TC180": "A host that cannot be reached, or does not answer in time.",
    "TC181": "A host whose key is not the one that ssh knows.",
    "TC182": "A host that asks for a password.",
    "TC183": "A host where trainctl cannot be started.",
    "TC184": "A host with other versions of packages.",
    "TC185": "A host with another code of trainctl.",
    "TC186": "A host with other devices, cores or memory than the plan is for.",
    "TC187": "A host that does not share the run's storage.",
    "TC188": "A host with too little disk for a checkpoint.",
    "TC189": "A port that cannot be used on a host.",
    "TC190": "Hosts whose clocks differ.",
    "TC191": "A host without the network interface, or whose interface does not listen.",
    "TC192": "Hosts that cannot reach each other.",
    "TC193": "A variable that is set here and not forwarded to the hosts.",
    "TC194": "A host without the files of the user's code, or with other versions of them.",
    "TC196": "A disk without space for a checkpoint.",
    "TC197": "sbatch, srun or kubectl is missing where a run is handed over.",
    "TC200": "A DeepSpeed JSON that is no JSON.",
    "TC201": "A key that a DeepSpeed JSON gives twice; DeepSpeed refuses it.",
    "TC202": "A comment, or a comma too many: DeepSpeed reads Hjson, others read JSON.",
    "TC305": "A definition in another package is not the one that trainctl was written for.",
    "TC345": "A source that cannot give what a run takes of it.",
    "TC346": "A source of which a run takes another number of tokens or epochs than was asked for.",
    "TC347": "Text that a longer sequence leaves out of an epoch that has begun.",
    "TC348": "A source whose files cannot be read.",
    "TC350": "A source that trains on what another source holds out.",
    "TC359": "Filters made for pages of the web, on sources of programs.",
    "TC360": "A file of ids that does not fit its index, or whose ids are not the tokenizer's.",
    "TC371": "Frozen weights in a checkpoint of another run, which may remove it.",
    "TC367": "Conversations, and a tokenizer without a chat template.",
}
"""Findings that are made while something is read or compared, not by a rule of a list."""

COLUMNS = {
    "runs, passed": ("runs it", "passes it"),
    "trap, refused": ("runs it, not as one expects", "refuses it"),
    "refused, refused": ("refuses it", "refuses it"),
    "refused, passed": ("refuses it", "passes it"),
    "runs, refused": ("runs it", "refuses it"),
}


def page() -> str:
    """The whole page, as Markdown."""
    parts = [
        INTRODUCTION,
        "## The configuration and the plan\n| rule | what must hold |\n|---|---|",
        "\n".join(f"| {identifier} | {_title(rule)} |" for identifier, rule in PLAN_RULES),
        "\n## While reading, and on this machine\n| rule | what is found |\n|---|---|",
        "\n".join(f"| {identifier} | {text} |" for identifier, text in FOUND_ELSEWHERE.items()),
        "",
        "\n".join(_deepspeed()),
        "",
        "\n".join(_comparison()),
    ]
    return "\n".join(parts) + "\n"


def _deepspeed() -> Iterator[str]:
    yield f"## DeepSpeed's JSON, version {load().deepspeed}"
    yield "*DeepSpeed* says what DeepSpeed itself does with a JSON that breaks the rule, once the"
    yield "processes run: it refuses it, says nothing and does something else, or fails later."
    yield "The file is DeepSpeed's."
    yield ""
    yield "| rule | severity | what must hold | DeepSpeed | file | what to do |"
    yield "|---|---|---|---|---|---|"
    for rule in DEEPSPEED_RULES:
        cells = (
            rule.identifier,
            rule.severity,
            rule.title,
            rule.meets,
            f"`{rule.file}`",
            rule.fix,
        )
        yield "| " + " | ".join(_cell(str(cell)) for cell in cells) + " |"


def _comparison() -> Iterator[str]:
    recorded = json.loads(MATRIX.read_text(encoding="utf-8"))
    yield "## How it compares with the real DeepSpeed"
    yield f"{recorded['cases']} JSONs drawn from the schema by a seed, about half of them legal,"
    yield "each checked, then given to `deepspeed.initialize` and one step on two CPU processes:"
    yield ""
    yield "| DeepSpeed | trainctl | JSONs |"
    yield "|---|---|---|"
    for kind, (theirs, ours) in COLUMNS.items():
        yield f"| {theirs} | {ours} | {recorded.get(kind, 0)} |"
    yield ""
    yield "The tests hold the last two rows at 0, on this seed and others. What DeepSpeed accepts"
    yield "and trainctl refuses breaks a rule of the table above where DeepSpeed says nothing or"
    yield "fails later; and Hjson without quotes or commas is refused (TC200). Not drawn are"
    yield "settings that two CPU processes cannot show: GPU kernels, NVMe, real models, services."


def _title(rule: object) -> str:
    return _cell((rule.__doc__ or "").strip().partition("\n")[0])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """Write the page, or with `--check` say whether it is up to date."""
    text = page()
    if "--check" not in arguments:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text:
        return 0
    print("docs/rules.md is out of date: run `make docs`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
