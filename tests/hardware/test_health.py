"""Checks of this machine: each finds what is wrong, and says nothing where nothing is.

Compilers, files and limits are real: PATH, environment and resource limits are changed around the
checks. Vendors' tools and packages that cannot be had here are stand-ins.
"""

from __future__ import annotations

import os
import py_compile
import resource
import shutil
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from trainctl.config.registry import new_section
from trainctl.config.schema import Accelerator, RunConfig
from trainctl.errors import ExitCode, Finding, Severity
from trainctl.hardware import builds, detect, devices, host_checks, packages, storage
from trainctl.hardware.detect import Hardware
from trainctl.launchers.planning import compose_config
from trainctl.options import logger

CPU = Hardware(name="2xcpu", accelerator=Accelerator.cpu, nodes=1, devices_per_node=2)
CUDA = Hardware(name="2xh100", accelerator=Accelerator.cuda, nodes=1, devices_per_node=2)
NODES = Hardware(name="2x1xcpu", accelerator=Accelerator.cpu, nodes=2, devices_per_node=1)


def config(*overrides: str) -> RunConfig:
    return compose_config(["recipe=tiny", *overrides], None).config


def rules(found: Any) -> list[str]:
    return [each.rule for each in found if isinstance(each, Finding)]


def only(found: Any) -> Finding:
    (finding,) = [each for each in found if isinstance(each, Finding)]
    assert finding.hint and finding.exit_code is ExitCode.environment
    return finding


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function that puts a tool on an otherwise empty PATH; device variables are unset."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "CXX", "DS_SKIP_CUDA_CHECK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(folder))
    detect.query_tool.cache_clear()

    def put(name: str, script: str) -> None:
        path = folder / name
        path.write_text(f"#!{shutil.which('sh', path='/bin:/usr/bin')}\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        detect.query_tool.cache_clear()

    yield put
    detect.query_tool.cache_clear()


def put_gpus(tools: Any, *capabilities: str) -> None:
    rows = [
        f"{index}, GPU-{index}aaa-1, NVIDIA GPU, 81559, {capability}"
        for index, capability in enumerate(capabilities)
    ]
    listing = "\n".join(rows)
    tools("nvidia-smi", f'[ "$1" ] || {{ echo "CUDA Version: 12.4"; exit; }}\necho "{listing}"')


def test_a_healthy_machine_for_the_tiny_recipe() -> None:
    examined = host_checks.examine_machine(config(), CPU)
    assert [each.name for each in examined] == [name for name, _ in host_checks.CHECKS]
    assert host_checks.preflight(config(), CPU) == []
    assert "torch" in examined[0].facts[0]


def test_every_rule_of_the_machine_has_one_place() -> None:
    folder = Path(host_checks.__file__).parent
    text = "\n".join(path.read_text() for path in sorted(folder.glob("*.py")))
    found = {
        rule
        for rule in (f"TC{number}" for number in (*range(120, 140), 372, 373, 460))
        if rule in text
    }
    assert found == {*(f"TC{number}" for number in range(120, 138)), "TC372", "TC373", "TC460"}


# ---------------------------------------------------------------- packages


def test_extras_that_a_plan_needs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(packages.check_extras(config(), CPU)) == []
    gone = {"liger_kernel", "bitsandbytes", "gcsfs", "wandb"}
    monkeypatch.setattr(
        packages, "find_spec", lambda name: None if name in gone else find_spec("csv")
    )
    chosen = config(
        "adapter=lora",
        "adapter.base_weights=nf4",
        "kernels.liger=true",
        "optimizer=adamw_8bit",
        "callbacks=[task_evaluation]",
        "logging.to=[prometheus,wandb]",
        "data=files",
        "data.paths=[gs://bucket/*.jsonl.zst,file:///there/*.txt]",
    )
    found = list(packages.check_extras(chosen, CPU))
    facts = [each.partition(" ")[0] for each in found if isinstance(each, str)]
    assert facts == ["data", "eval", "finetune", "fp8", "gcs", "liger", "wandb"]
    assert "gcs (gcsfs missing)" in found
    assert {each.key: each.hint for each in found if isinstance(each, Finding)} == {
        "adapter.base_weights": "adapter.base_weights=compute, or pip install 'trainctl[finetune]'",
        "data.paths": "pip install 'trainctl[gcs]'",
        "kernels.liger": "kernels.liger=false, or pip install 'trainctl[liger]'",
    }  # wandb has a check of its own


def test_a_source_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    chosen = config("data.sources={rows: {kind: parquet, paths: [a.parquet], weight: 1}}")
    finding = only(packages.check_extras(chosen, CPU))
    assert finding.message.startswith("data.sources.rows.kind=parquet needs pyarrow")
    assert finding.hint == "pip install 'trainctl[data]'"


def test_what_a_logger_imports_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = config("logging.to=[prometheus,wandb]")
    monkeypatch.setattr(logger, "find_spec", lambda module: find_spec("csv"))
    assert list(packages.check_loggers(chosen, CPU)) == ["prometheus, wandb"]
    monkeypatch.setattr(logger, "find_spec", lambda module: None)
    finding = only(packages.check_loggers(chosen, CPU))
    assert (finding.rule, finding.key) == ("TC124", "logging.to")
    assert "'trainctl[wandb]'" in finding.hint
    assert list(packages.check_loggers(config(), CPU)) == ["tensorboard"]
    elsewhere = config(
        "logging.to=[prometheus,wandb]", f"logging.python={sys.base_prefix}/bin/python3"
    )
    finding = only(packages.check_loggers(elsewhere, CPU))
    assert finding.key == "logging.python" and "wandb" in finding.message


def test_a_folder_of_a_logger_s_name_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trackers make folders of their own names where they are started."""
    (tmp_path / "no_such_tracker").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    spec = logger.Logger(name="x", modules=("csv", "no_such_tracker"))
    for python in (sys.executable, f"{sys.base_prefix}/bin/python3"):
        found = logger.missing_modules_finding(spec, python)
        assert found is not None and "no_such_tracker" in found.message


def put_package(folder: Path, name: str, version: str, *requires: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")


def test_versions_that_do_not_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_package(tmp_path, "deepspeed", "0.19.8", "torch>=2.8", "gone>=1", 'old<1; extra == "x"')
    put_package(tmp_path, "torch", "2.1.0+cu118")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = [
        each for each in packages.check_requirements(config(), CPU) if isinstance(each, Finding)
    ]
    assert [(f.rule, f.message, f.hint) for f in found] == [
        (
            "TC124",
            "deepspeed 0.19.8 needs torch >=2.8, and 2.1.0+cu118 is installed",
            "pip install 'torch>=2.8'",
        ),
        (
            "TC124",
            "deepspeed 0.19.8 needs gone >=1, and is not installed",
            "pip install 'gone>=1'",
        ),
    ]


@pytest.mark.parametrize(
    ("cuda", "hip", "accelerator", "message"),
    [
        ("None", "None", Accelerator.cuda, "was built without cuda"),
        ("'12.8'", "None", Accelerator.rocm, "was built without rocm"),
        ("'12.8'", "None", Accelerator.cuda, ""),
        ("'13.0'", "None", Accelerator.cuda, "and the driver supports CUDA 12.4"),
        ("None", "'6.2'", Accelerator.rocm, ""),
        ("None", "None", Accelerator.cpu, ""),
    ],
)
def test_torch_and_the_device(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tools: Any,
    cuda: str,
    hip: str,
    accelerator: Accelerator,
    message: str,
) -> None:
    put_package(tmp_path, "torch", "2.13.0")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text(
        f"cuda: Optional[str] = {cuda}\nhip: Optional[str] = {hip}\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    put_gpus(tools, "9.0")
    hardware = Hardware(name="x", accelerator=accelerator, nodes=1, devices_per_node=1)
    found = list(packages.check_torch_build(config(), hardware))
    if message:
        assert only(found).rule == "TC125" and message in only(found).message
    else:
        assert len(found) == 1 and rules(found) == []


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0,1", ""),
        ("GPU-1aaa,0", ""),
        ("0,7,1", "names 7, which is not here: it and all after it are ignored"),
        ("1,1", "names 1 twice"),
        ("1", "shows 1 of the 2 devices of the plan"),
    ],
)
@pytest.mark.parametrize("by_config", [False, True])
def test_devices_that_the_variable_names(
    tools: Any, monkeypatch: pytest.MonkeyPatch, value: str, message: str, by_config: bool
) -> None:
    put_gpus(tools, "9.0", "9.0")
    overrides = []
    if by_config:
        overrides = [f'launcher.environment.CUDA_VISIBLE_DEVICES="{value}"']
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    found = list(devices.check_visible_devices(config(*overrides), CUDA))
    if message:
        finding = only(found)
        assert finding.rule == "TC133" and message in finding.message
        assert finding.key == ("launcher.environment" if by_config else "hardware.devices_per_node")
    else:
        assert found == [f"CUDA_VISIBLE_DEVICES={value}"]


@pytest.mark.parametrize(
    ("compute", "capability", "is_able"),
    [("bf16", "7.5", False), ("bf16", "8.0", True), ("fp8", "8.0", False), ("fp8", "9.0", True)],
)
def test_the_format_of_the_device(tools: Any, compute: str, capability: str, is_able: bool) -> None:
    put_gpus(tools, "9.0", capability)
    made = config()
    made.precision = new_section("precision", compute)
    found = list(devices.check_number_formats(made, CUDA))
    assert rules(found) == ([] if is_able else ["TC134"])
    if not is_able:
        assert f"(device 1) does not compute in {compute}" in only(found).message


@pytest.mark.parametrize(
    ("flags", "lacking"),
    [
        ("fpu avx avx2 fma f16c", {"bf16", "fp16"}),
        ("fpu avx2 avx512f avx512bw avx512vl", {"fp16"}),
        ("fpu avx2 avx512bw avx512_bf16 amx_bf16 avx512_fp16", set()),
        ("fpu avx2 avx_ne_convert", set()),
        (None, set()),
    ],
)
def test_the_formats_of_a_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str | None, lacking: set[str]
) -> None:
    told = tmp_path / "cpuinfo"
    told.write_text("processor\t: 0\n" + (f"flags\t\t: {flags}\n" if flags else ""))
    assert devices.lacking_formats(told) == lacking
    monkeypatch.setattr(devices, "lacking_formats", lambda: frozenset(lacking))
    for compute in ("fp32", "bf16", "fp8"):  # fp8: the rest of it is computed in bf16
        made = config()
        made.precision = new_section("precision", compute)
        slow = compute != "fp32" and "bf16" in lacking
        for script in (None, "train.py"):
            made.script = script
            found = list(devices.check_number_formats(made, CPU))
            assert rules(found) == (["TC372"] if slow and script else [])


@pytest.mark.parametrize(
    ("is_compiled", "variable", "mode", "said"),
    [
        (True, "1", 0o755, ""),
        (False, "", 0o755, ""),
        (False, "1", 0o755, "PYTHONDONTWRITEBYTECODE is set"),
        (False, "", 0o555, "cannot be written to"),
    ],
)
def test_packages_that_every_process_compiles(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_compiled: bool,
    variable: str,
    mode: int,
    said: str,
) -> None:
    about = tmp_path / "torch-1.0.dist-info" / "METADATA"
    source = tmp_path / "torch" / "__init__.py"
    for path, text in ((about, "Name: torch\nVersion: 1.0\n"), (source, "")):
        path.parent.mkdir()
        path.write_text(text)
    if is_compiled:
        py_compile.compile(str(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(packages, "SLOW_TO_COMPILE", {"torch": "torch/__init__.py"})
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", variable)
    if mode == 0o555 and os.geteuid() == 0:  # who may write everywhere is told so
        monkeypatch.setattr(packages.os, "access", lambda *_: False)
    source.parent.chmod(mode)
    try:
        found = list(packages.check_bytecode_cache(config(), CPU))
    finally:
        source.parent.chmod(0o755)
    if said:
        assert rules(found) == ["TC373"] and said in only(found).message
    else:
        assert found == ["kept"]


# ---------------------------------------------------------------- caches


def test_root_hears_of_a_cache_in_another_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TRAINCTL_CACHE_DIR", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "trainctl").mkdir(parents=True)
    owners = {tmp_path / "cache" / "trainctl": 0, tmp_path / "cache": 0}
    real = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        found = real(path, **options)
        parts = [*found]
        parts[4] = owners.get(path, parts[4])
        return os.stat_result(parts)

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert list(storage.check_root_caches(config(), CPU)) == []
    owners[tmp_path / "cache"] = 65534  # where torch's operators will be
    finding = only(storage.check_root_caches(config(), CPU))
    assert (finding.rule, finding.severity) == ("TC460", Severity.warning)
    assert f"{tmp_path / 'cache' / 'torch_extensions'}, and {tmp_path / 'cache'}" in finding.message
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))
    assert len(list(storage.check_root_caches(config(), CPU))) == 2
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert list(storage.check_root_caches(config(), CPU)) == []


# ---------------------------------------------------------------- builds


@pytest.mark.parametrize(
    ("overrides", "hardware", "operators"),
    [
        ([], CPU, {}),
        (["offload=cpu"], CPU, {"cpu_adam": "offload.optimizer"}),
        (
            ["offload=nvme", "zero_stage=3"],
            CUDA,
            {"cpu_adam": "offload.optimizer", "async_io": "offload.parameters"},
        ),
        (["optimizer=lamb", "script=train.py"], CUDA, {"fused_lamb": "optimizer.kind"}),
        (["optimizer=lamb"], CUDA, {}),
        (["optimizer=lion"], CUDA, {"fused_lion": "optimizer.kind"}),
        (
            ["zero_stage.quantized_weights=true"],
            CUDA,
            {"quantizer": "zero_stage.quantized_weights"},
        ),
        (["script=train.py"], CPU, {"deepspeed_shm_comm": "script"}),
        (["trainer=a:b"], CPU, {"deepspeed_shm_comm": "trainer"}),
        (["script=train.py"], CUDA, {}),
    ],
)
def test_what_deepspeed_will_compile(
    overrides: list[str], hardware: Hardware, operators: dict[str, str]
) -> None:
    assert builds.needed_operators(config(*overrides), hardware) == operators


def test_what_was_compiled_before_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "installed_ops={'cpu_adam': True, 'async_io': False}\n"
    monkeypatch.setattr(builds, "packaged_text", lambda *_: text)
    made = config("offload=nvme", "zero_stage=3")
    assert list(builds.needed_operators(made, CPU)) == ["async_io"]


def test_a_machine_without_compilers(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config("offload=cpu")
    assert list(builds.check_compiler(config(), CPU)) == []
    (finding,) = builds.check_compiler(made, CPU)
    assert isinstance(finding, Finding) and finding.rule == "TC126"
    assert "compile cpu_adam" in finding.message and "C++ compiler (c++)" in finding.message
    monkeypatch.setattr(builds.sysconfig, "get_path", lambda name: "/nowhere")
    monkeypatch.setattr(builds.sys, "executable", "/nowhere/bin/python")
    hints = [each.hint for each in builds.check_compiler(made, CPU) if isinstance(each, Finding)]
    assert hints == ["apt install g++", "pip install ninja", "apt install python3-dev"]
    monkeypatch.setenv("CXX", "my-c++")
    tools("my-c++", "exit 0")
    assert len(rules(builds.check_compiler(made, CPU))) == 2


def test_ninja_must_be_a_program_that_ranks_find(
    tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed runs it: the Python package alone will not do."""
    tools("c++", "exit 0")
    (tmp_path / "Python.h").write_text("")
    monkeypatch.setattr(builds.sysconfig, "get_path", lambda name: str(tmp_path))
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    monkeypatch.setattr(builds.sys, "executable", str(python))
    assert only(builds.check_compiler(config("offload=cpu"), CPU)).hint == "pip install ninja"
    # That of the environment is found although the environment is not activated.
    ninja = python.with_name("ninja")
    ninja.write_text("")
    ninja.chmod(0o755)
    assert rules(builds.check_compiler(config("offload=cpu"), CPU)) == []
    assert shutil.which("ninja", path=builds.tools_path()) == str(ninja)


def test_the_lock_of_a_killed_build_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lock = tmp_path / "torch_extensions" / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    wants = config("offload=cpu")
    with lock.open("w"):
        assert list(builds.check_build_locks(wants, CPU)) == []  # torch holds it while it builds
    with subprocess.Popen(["sleep", "60"], cwd=lock.parent) as builder:
        try:
            assert list(builds.check_build_locks(wants, CPU)) == []  # somebody works there
        finally:
            builder.kill()
    (finding,) = builds.check_build_locks(wants, CPU)
    assert isinstance(finding, Finding)
    assert (finding.rule, finding.key, finding.hint) == ("TC137", "offload.optimizer", f"rm {lock}")
    assert list(builds.check_build_locks(config(), CPU)) == []  # nothing that is needed
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(lock.parents[1]))
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    assert len(list(builds.check_build_locks(wants, CPU))) == 1
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(lock.parents[1].with_name("of_another_user")))
    assert list(builds.check_build_locks(wants, CPU)) == []


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")
def test_a_program_is_really_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert builds.can_link("int main() { return 0; }\n", "-lm")
    assert not builds.can_link("int main() { return 0; }\n", "-lno_such_library")
    assert not builds.can_link("#include <no_such_header.h>\nint main() { return 0; }\n")
    monkeypatch.setattr(builds, "can_link", lambda *_: False)
    made = config("offload=nvme", "zero_stage=3")
    assert only(builds.check_libaio(made, CPU)).rule == "TC127"
    assert list(builds.check_libaio(config("offload=cpu"), CPU)) == []


@pytest.mark.parametrize(
    ("overrides", "release", "rule"),
    [
        (["offload=cpu"], None, None),
        (["optimizer=lion"], None, "TC128"),
        (["offload=cpu"], "11.8", "TC128"),
        (["offload=cpu"], "12.1", None),
        ([], "11.8", None),
    ],
)
def test_the_toolkit_and_torch(
    tools: Any,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    release: str | None,
    rule: str | None,
) -> None:
    monkeypatch.setattr(builds, "torch_build", lambda: ("12.8", ""))
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    if release:
        monkeypatch.delenv("CUDA_HOME")
        tools("nvcc", f'echo "Cuda compilation tools, release {release}, V{release}.1"')
    found = list(builds.check_cuda_toolkit(config(*overrides), CUDA))
    assert rules(found) == ([rule] if rule else [])
    if rule and release:
        monkeypatch.setenv("DS_SKIP_CUDA_CHECK", "1")
        assert list(builds.check_cuda_toolkit(config(*overrides), CUDA)) == []


@pytest.mark.parametrize(
    ("overrides", "named", "hint"),
    [
        (["optimizer=lion"], "9.0a", "TORCH_CUDA_ARCH_LIST=9.0"),
        (["optimizer=lion"], "9.0a;10.0a+PTX", "TORCH_CUDA_ARCH_LIST='9.0;10.0+PTX'"),
        (["optimizer=lion"], "9.0;12.0+PTX", None),
        (["offload=cpu"], "9.0a", None),  # built for the host alone
        ([], "9.0a", None),
    ],
)
def test_an_architecture_that_deepspeed_cannot_read(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], named: str, hint: str | None
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", named)
    found = list(builds.check_architectures(config(*overrides), CUDA))
    assert [each.hint for each in found if isinstance(each, Finding)] == ([hint] if hint else [])


# ---------------------------------------------------------------- limits


def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    space = shutil.disk_usage("/")
    small = space._replace(total=64 * 2**20, free=60 * 2**20)
    monkeypatch.setattr(host_checks.shutil, "disk_usage", lambda path: small)
    finding = only(host_checks.check_shared_memory(config(), CPU))
    assert finding.rule == "TC129" and not finding.is_error
    assert "60 of 64 MiB free; 2 processes may need 128" in finding.message
    alone = Hardware(name="cpu", accelerator=Accelerator.cpu, nodes=1, devices_per_node=1)
    assert list(host_checks.check_shared_memory(config(), alone)) == []
    monkeypatch.undo()
    monkeypatch.setattr(host_checks, "SHARED_MEMORY", tmp_path / "none")
    assert only(host_checks.check_shared_memory(config(), CPU)).is_error


def test_locked_memory() -> None:
    nvme = config("offload=nvme", "zero_stage=3")
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (4 * 2**20, before[1]))
    try:
        assert list(host_checks.check_locked_memory(config(), CPU)) == []
        finding = only(host_checks.check_locked_memory(nvme, CPU))
        assert finding.rule == "TC130" and "at most 4.0 MiB" in finding.message
        assert "InfiniBand" in only(host_checks.check_locked_memory(config(), NODES)).message
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def test_host_memory() -> None:
    here = detect.host_memory_limit()
    for planned, rule in ((here, []), (here // 2, []), (here * 2, ["TC131"])):
        hardware = Hardware(
            name="cpu",
            accelerator=Accelerator.cpu,
            nodes=1,
            devices_per_node=1,
            host_memory_bytes=planned,
        )
        assert rules(host_checks.check_host_memory(config(), hardware)) == rule


# ---------------------------------------------------------------- storage


def nvme_findings(folder: Path) -> list[Any]:
    made = config("offload=nvme", "zero_stage=3", f"offload.nvme_path={folder}")
    return list(storage.check_nvme(made, CPU))


def test_a_folder_is_written_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rules(nvme_findings(tmp_path)) == [] or "tmpfs" in only(nvme_findings(tmp_path)).message
    assert list(tmp_path.iterdir()) == []
    assert list(storage.check_nvme(config(), CPU)) == []
    assert "does not exist" in only(nvme_findings(tmp_path / "none")).message
    (tmp_path / "file").write_text("")
    assert "is not a folder" in only(nvme_findings(tmp_path / "file")).message

    def forget(descriptor: int, buffers: list[Any], offset: int) -> int:
        buffers[0][:4] = b"lost"
        return len(buffers[0])

    monkeypatch.setattr(storage.os, "preadv", forget)
    finding = only(nvme_findings(tmp_path))
    assert finding.is_error and "not what was written" in finding.message
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("kind", ["tmpfs", "nfs4"])
def test_what_is_no_local_disk_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(storage, "filesystem_type", lambda folder: kind)
    finding = only(nvme_findings(tmp_path))
    assert not finding.is_error and kind in finding.message


def test_the_file_system_of_a_folder() -> None:
    assert storage.filesystem_type(Path("/proc/self")) == "proc"


def test_a_full_disk_is_no_place(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        finding = only(nvme_findings(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert finding.is_error
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- network


@pytest.mark.parametrize(
    ("variable", "value", "is_well"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", True),
        ("GLOO_SOCKET_IFNAME", "l", False),
        ("NCCL_SOCKET_IFNAME", "l", True),
        ("NCCL_SOCKET_IFNAME", "=l", False),
        ("NCCL_SOCKET_IFNAME", "^docker", True),
        ("NCCL_SOCKET_IFNAME", "lo,eth77", False),
    ],
)
def test_interfaces(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, is_well: bool
) -> None:
    for name in host_checks.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert list(host_checks.check_interfaces(config(), CPU)) == []
    monkeypatch.setenv(variable, value)
    found = list(host_checks.check_interfaces(config(), NODES))
    assert rules(found) == ([] if is_well else ["TC135"])
    if not is_well:
        assert "one of " in only(found).hint and "lo" in only(found).hint


@pytest.mark.parametrize(
    ("address", "is_well"), [("10.0.0.7", True), ("127.0.1.1", False), (None, False)]
)
def test_the_name_of_this_host(
    monkeypatch: pytest.MonkeyPatch, address: str | None, is_well: bool
) -> None:
    for name in host_checks.VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def look_up(host: str) -> str:
        if address is None:
            raise OSError("no such name")
        return address

    monkeypatch.setattr(host_checks.socket, "gethostbyname", look_up)
    found = list(host_checks.check_interfaces(config(), NODES))
    assert rules(found) == ([] if is_well else ["TC135"])
    assert os.environ.get("GLOO_SOCKET_IFNAME") is None
