"""What `trainctl data plan --scale` says follows from the recorded rates and the formats."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from trainctl.cli.main import run
from trainctl.data.quality.columns import MeasuredCorpus
from trainctl.data.quality.shuffle import search_in, shuffle
from trainctl.data.source_sampler import splitmix64
from trainctl.errors import ExitCode
from trainctl.plans.preparation import (
    ROW_BYTES,
    preparation_cost,
    preparation_rates,
    range_bits,
    shuffle_share,
)


def cost(tokens: int, cores: int = 1, sort_bytes: int = 1 << 30):
    return preparation_cost(
        tokens,
        cores=cores,
        sort_bytes=sort_bytes,
        vocab_size=32_000,
        has_filters=True,
        bands=16,
    )


def test_costs_are_the_measured_ones_and_grow_linearly() -> None:
    rates = preparation_rates()
    measured, more = cost(rates["tokens"]), cost(1000 * rates["tokens"], cores=10)
    assert measured.text_bytes == rates["text_bytes"]
    for step, larger in zip(measured.steps, more.steps, strict=True):
        assert step.core_hours * 3600 == pytest.approx(rates["seconds"][step.name])
        assert larger.core_hours == pytest.approx(1000 * step.core_hours)
        assert larger.traffic == pytest.approx(1000 * step.traffic, rel=1e-3)
        alone = step.name in ("decide", "assemble")
        assert larger.hours == pytest.approx(larger.core_hours / (1 if alone else 10))
    parts = measured.steps[0].disk
    assert parts == pytest.approx(rates["disk"]["parts"], rel=0.05)


def test_reads_of_the_shuffle_grow_with_the_square_beyond_the_ranges() -> None:
    def reads(tokens: int, sort_bytes: int = 1 << 30) -> int:
        text = cost(tokens, sort_bytes=sort_bytes).limits[0]
        return int(text.partition("files and ")[2].partition(" reads")[0].replace(",", ""))

    assert reads(4 * 10**13) == pytest.approx(16 * reads(10**13), rel=0.01)
    assert reads(10**13, 4 << 30) == pytest.approx(reads(10**13) / 16, rel=0.01)
    assert reads(2 * 10**11) < 3 * reads(10**11)


def test_a_shuffle_has_the_files_and_ranges_that_are_predicted(tmp_path: Path) -> None:
    keys, memory = splitmix64(np.arange(2000, dtype=np.uint64) // 2), 32_768
    ids = np.arange(len(keys))
    inputs = [
        (partial(lambda at: [(keys[at], ids[at])], slice(n, n + 100)), 100)
        for n in range(0, len(keys), 100)
    ]
    share = shuffle_share(len(keys), memory)
    with search_in(MeasuredCorpus([]), tmp_path / "scratch", memory) as search:
        found = shuffle(search, "near", inputs, lambda groups: {"id": groups[0]})
        maps = len(list(search.folder.glob("near-map-*")))
        assert sum(len(each["id"]) for each in found) == len(keys)
    assert len(found) == 1 << range_bits(len(keys), share) == 4
    assert maps == math.ceil(len(keys) * ROW_BYTES / share) == 4


def test_the_command_prints_it_and_refuses_what_is_no_size(
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = ["data.dedup=minhash", "--scale", "10T"]
    assert run(["data", "plan", *more, "--cores", "2000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 10**13 and found["cores"] == 2000
    assert found["hours"] == pytest.approx(sum(step["hours"] for step in found["steps"]))
    less = ["data.dedup=minhash", f"data.sort_bytes={1 << 28}"]
    assert run(["data", "plan", "recipe=tiny", *less, "--scale", "10T"]) == 0
    shown = capsys.readouterr().out
    assert "10 T tokens" in shown and "assemble" in shown and "decide: " in shown
    assert "300 core s/GB of text" in shown and "a second" in shown
    assert found["limits"][0] not in shown
    for bad in ("10X", "0", "-1", "1e12", "9" * 30):
        assert run(["data", "plan", "--scale", bad]) == ExitCode.bad_input
        assert "is no number of tokens" in capsys.readouterr().err
    for unused in (["--cores", "2"], [*more, "--plot", "cost.svg"]):
        assert run(["data", "plan", *unused]) == ExitCode.bad_input
        assert "--scale" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "steps", "limits"),
    [
        ([], "tokenize assemble", ["assemble"]),
        (["data.max_bytes=1000"], "tokenize assemble", ["assemble", "tokenize"]),
        (["data.dedup=exact"], "tokenize shuffle compare decide assemble", None),
        (["data.filters={c4: {}}"], "tokenize filters shuffle compare decide assemble", None),
        (
            ["data.dedup=minhash"],
            "tokenize signatures shuffle compare decide assemble",
            ["shuffle", "decide", "assemble"],
        ),
        (
            ["data.dedup=substring", "data.decontaminate=[held_out]"],
            "tokenize shuffle compare decide assemble",
            ["shuffle", "decide", "assemble", "not counted, for lack of a rate"],
        ),
    ],
)
def test_only_the_steps_of_the_configuration_are_counted(
    capsys: pytest.CaptureFixture[str], overrides: list[str], steps: str, limits: list[str] | None
) -> None:
    command = ["data", "plan", "recipe=tiny", "data=files", "data.paths=[a]", *overrides]
    assert run([*command, "--scale", "1T", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found["steps"]] == steps.split()
    assert limits is None or [each.partition(":")[0] for each in found["limits"]] == limits
    assert found["cores"] == (1 if overrides == ["data.max_bytes=1000"] else 1000)
    assert "28 MB of generated text" in found["measured"]
    if overrides == ["data.dedup=minhash"]:  # a lower threshold has more bands
        assert run([*command, "data.dedup_threshold=0.5", "--scale", "1T", "--json"]) == 0
        more = {each["name"]: each for each in json.loads(capsys.readouterr().out)["steps"]}
        assert more["shuffle"]["core_hours"] > 1.3 * found["steps"][2]["core_hours"]
