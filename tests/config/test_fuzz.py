"""Whatever is typed or written, a configuration or a TrainctlError comes out: never a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.compose import compose, recompose
from trainctl.config.keys import leaves
from trainctl.config.schema import GROUPS, RunConfig
from trainctl.errors import TrainctlError

ODD = (
    "1 -1 0.5 1e999 nan null true ??? '' [] {} [1,2] {a:1} {a:{b:[c]}} 1,2 int(3) glob(*) tiny "
    "${training.seed} ${a} ${hydra:x} ${ ${oc.env:HOME} 2xcpu 4x8xh100-80g 999999xcpu llama-7b "
    "\\ \" ' ( {1:2} 0x10 1_0 \u0663 [${training.steps}] {_target_:a}"
)
LEGAL = (
    "recipe=tiny recipe=70b-3d zero_stage=3 hardware=4x8xh100-80g model=gpt2-124m offload=cpu "
    "training.seed=3 training.steps=${training.seed} +deepspeed.a={b:1} deepspeed.a=2 deepspeed={} "
    "deepspeed.a.b.c=${training} launcher.environment.A=1 model.path=/nowhere data.paths=[a,b]"
)
KEYS = st.sampled_from([*leaves(), *GROUPS, "recipe", "deepspeed.a.b", "lr", "hydra.run", "a/b@c"])
PREFIXES = st.sampled_from(["", "", "", "+", "++", "~"])
VALUES = st.one_of(
    st.sampled_from(ODD.split()),
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
)
OVERRIDES = st.lists(
    st.one_of(
        st.builds(lambda prefix, key, value: f"{prefix}{key}={value}", PREFIXES, KEYS, VALUES),
        st.text(max_size=20),
        st.sampled_from(LEGAL.split()),
        st.sampled_from(LEGAL.split()),
    ),
    max_size=4,
)
FUZZ = settings(suppress_health_check=[HealthCheck.too_slow])


@contextmanager
def refused() -> Iterator[None]:
    """Assert that an error, if one is raised, has findings, each with a message and a rule."""
    try:
        yield
    except TrainctlError as error:
        assert error.findings
        assert all(finding.message and finding.rule for finding in error.findings)


@settings(FUZZ, max_examples=80)
@given(OVERRIDES)
@example(["training.seed=" + "9" * 5000])
@example(["model.name=" + "[" * 200 + "]" * 200])
@example(["\x00=\x00", "\ud800=1"])
def test_any_command_line(overrides: list[str]) -> None:
    with refused():
        config = compose(overrides).config
        assert from_plain(RunConfig, to_plain(config)) == config


@settings(FUZZ, max_examples=60)
@given(OVERRIDES)
def test_any_change_of_a_saved_run(overrides: list[str]) -> None:
    with refused():
        recompose(RunConfig(), overrides)


LINES = st.one_of(
    st.builds(lambda key, value: f"{key}: {value}", KEYS, VALUES),
    st.builds(lambda key, value: f"  {key}: {value}", st.sampled_from(["lr", "steps"]), VALUES),
    st.builds(lambda value: f"- {value}", VALUES),
    st.sampled_from(["defaults:", "- base", "- override /model: llama-7b", "training:", "<<: 1"]),
    st.text(max_size=20),
)


@settings(FUZZ, max_examples=80)
@given(st.lists(LINES, max_size=6), st.booleans())
@example(["<<: 1"], True)
@example(["? [a]", ": 1"], True)
@example(["training: {<<: [1]}"], True)
@example(["a: " + "[" * 3000], True)
@example(["training:", " steps: ${"], True)
def test_any_file_of_the_users(lines: list[str], starts_from_base: bool) -> None:
    head = "defaults: [base, _self_]\n" if starts_from_base else ""
    with TemporaryDirectory() as folder:
        recipes = Path(folder) / "recipes"
        recipes.mkdir()
        text = head + "\n".join(lines)
        (recipes / "mine.yaml").write_text(text, encoding="utf-8", errors="replace")
        with refused():
            compose(["recipe=mine"], config_dir=Path(folder))
