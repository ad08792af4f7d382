"""Secrets: which names stand for them, how they are refused, and what is shown of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainctl.cli.main import run as command
from trainctl.config.codec import to_plain
from trainctl.config.compose import compose, compose_leniently, recompose
from trainctl.config.literal_secrets import literal_secrets, referenced_variables, without_secrets
from trainctl.config.schema import RunConfig
from trainctl.config.secrets import (
    is_plain_variable,
    is_secret_name,
    redact_setting,
    redact_text,
    redact_words,
    resolve_words,
)
from trainctl.config.store import dump_config, load_config
from trainctl.errors import TrainctlError

CANARY = "canary-9f3a"


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "GITHUB_PAT",
        "AWS_ACCESS_KEY_ID",
        "DB_PASSWORD",
        "MY_AUTH",
        "SLURM_JWT",
        "apiKey",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "PGPASSWORD",
        "client_secret",
        "--auth-token",
    ],
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret_name(name) and not is_plain_variable(name, ["*"])
    assert is_plain_variable(name, [name])  # who names it exactly means it


@pytest.mark.parametrize(
    "name",
    [
        "tokens",
        "tokenizer",
        "text_key",
        "num_key_value_heads",
        "every_tokens",
        "eos_token",
        "eos_token_id",
        "PATH",
        "TOKENIZERS_PARALLELISM",
        "PYTHONPATH",
        "MONKEY",
        "AUTHOR",
        "max_tokens",
        "experiment_key",
    ],
)
def test_names_that_only_look_alike_are_none(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "override",
    [
        f"launcher.environment.HF_TOKEN={CANARY}",
        f"launcher.environment={{HF_TOKEN: {CANARY}}}",
        f"launcher.environment={{HF_TOKEN: {CANARY}, B: '${{oc.env:HOME}}'}}",
        f"launcher.environment.ANYTHING={CANARY}",
        f"launcher.environment.HF_TOKEN={CANARY} )",  # no override by its grammar
        f"launcher.environment.HF_TOKEN:{CANARY}",
        f"launcher.environment=HF_TOKEN:{CANARY}",
        f"launcher.environment.HF_TOKEN=${{oc.env:NOT_SET,{CANARY}}}",
        "launcher.environment.NCCL_DEBUG=${oc.env:HF_TOKEN,x}",
        f"launcher.enviroment.HF_TOKEN={CANARY}",
        f"HF_TOKEN={CANARY}",
        f"script_arguments=[--token,{CANARY}]",
        f"deepspeed.comet.api_key={CANARY}",
        f"logging.alerts.urls=['https://hooks/{CANARY}']",
        f"logging.alerts.urls=['${{oc.env:HOME}}','https://hooks/{CANARY}']",
        f"logging.alerts.urls=https://hooks/{CANARY}",
        f"logging.alerts={{urls: ['https://hooks/{CANARY}']}}",
        f"logging.mlflow.tracking_uri=http://me:{CANARY}@host:5000",
        f"logging.mlflow.tracking_uri=http://host:5000/?token={CANARY}",
        f"deepspeed={{comet: {{api_key: {CANARY}}}}}",
        "data.name=${oc.env:HF_TOKEN}",
        "recipe=${oc.env:HF_TOKEN}",
        "data.paths=['${oc.env:${oc.env:WHICH}}']",
        "logging.deepspeed_level=${launcher.environment.HF_TOKEN}",
    ],
)
def test_a_secret_is_refused_and_not_shown(
    override: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setenv("WHICH", "HF_TOKEN")
    for words in (["validate"], ["validate", "--json"], ["config", "show"]):
        given = [override] if "${launcher" not in override else [
            override, "launcher.environment.HF_TOKEN=${oc.env:HF_TOKEN}"
        ]  # fmt: skip
        assert command([*words, "recipe=tiny", *given]) == 2, override
        said = capfd.readouterr()
        assert CANARY not in said.out + said.err


def test_a_secret_in_a_file_is_refused_with_its_line(tmp_path) -> None:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "own.yaml").write_text(
        f"defaults: [tiny, _self_]\nlauncher:\n  environment:\n    HF_TOKEN: {CANARY}\n"
    )
    with pytest.raises(TrainctlError) as caught:
        compose(["recipe=own"], config_dir=tmp_path)
    (finding,) = caught.value.findings
    assert (finding.rule, finding.key) == ("TC167", "launcher.environment.HF_TOKEN")
    assert finding.source.endswith("own.yaml:4") and CANARY not in repr(finding)
    assert "launcher.environment.HF_TOKEN='${oc.env:HF_TOKEN}'" in finding.hint


@pytest.mark.parametrize(
    ("key", "override"),
    [
        ("data.paths", "data.paths=[a.txt,'https://me:{}@host/a.txt']"),
        ("data.url", "data.url=ftp://me:{}@host/corpus"),
        ("data.paths", "data.paths=['https://host/a.txt?part=1&sig={}']"),
        ("data.paths", "data.paths=['https://host/a.txt?X-Amz-Date=1&X-Amz-Signature={}&b=2']"),
        ("data.url", "data.url='https://host/a?token={}'"),
        ("data.sources.a.paths", "data.sources={{a: {{paths: ['https://h/a?key={}']}}}}"),
        ("data.sources.a.paths", "data.sources={{a: {{paths: ['s3://ID:{}@b/a.txt']}}}}"),
        ("data.decontaminate", "data.decontaminate=['https://:{}@host/a.txt']"),
    ],
)
def test_a_password_in_a_url_of_a_corpus_is_refused(key: str, override: str) -> None:
    kind = {"data.paths": ["data=files"], "data.url": ["data=stream"]}.get(key, [])
    with pytest.raises(TrainctlError) as caught:
        compose([*kind, override.format(CANARY)])
    (finding,) = caught.value.findings
    assert (finding.rule, finding.key) == ("TC167", key)
    assert CANARY not in repr(finding)


@pytest.mark.parametrize(
    "override",
    [
        "launcher=slurm launcher.slurm_options=['--export=HF_TOKEN={}']",
        "launcher=slurm launcher.slurm_options=[--exclusive,'--export=ALL,A=b,WANDB_API_KEY={}==']",
        "launcher=mpi launcher.mpi_options=[-x,'HF_TOKEN={}']",
    ],
)
def test_a_secret_among_the_options_of_a_launcher_is_refused_and_not_shown(
    override: str, capfd: pytest.CaptureFixture[str]
) -> None:
    given = override.format(CANARY).split()
    for words in (["validate"], ["validate", "--json"], ["config", "show"]):
        assert command([*words, "recipe=tiny", *given]) == 2
        said = capfd.readouterr()
        assert CANARY not in said.out + said.err and "TC167" in said.out + said.err
    plain = [text.replace("{}", "").replace("HF_TOKEN=", "HF_TOKEN") for text in override.split()]
    if "WANDB" not in override:
        compose(["recipe=tiny", *plain])  # by its name alone


def test_a_webhook_is_a_reference_that_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALERT_URL", CANARY)
    override = "logging.alerts.urls=['${oc.env:ALERT_URL}']"
    config = compose([override]).config
    assert config.logging.alerts.urls == ["${oc.env:ALERT_URL}"]
    assert CANARY not in dump_config(config) and referenced_variables(config) == ["ALERT_URL"]
    assert redact_setting(override) == override


def test_a_url_with_a_user_is_none() -> None:
    paths = ["abfs://box@account.host/a:b@c.txt", "hdfs://me@host:9000/a", "s3://b/a@b:c@d"]
    config = compose(["data=files", f"data.paths={paths}"]).config
    assert config.data.paths == paths  # type: ignore[attr-defined]


def test_a_reference_stays_one_in_what_is_written_and_in_a_resume(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setenv("MINE", CANARY)
    composed = compose(
        [
            "recipe=tiny",
            "launcher.environment.HF_TOKEN=${oc.env:MINE}",
            "launcher.environment={HEADER: 'Bearer ${oc.env:MINE}', NCCL_DEBUG: WARN}",
        ]
    )
    kept = {
        "HF_TOKEN": "${oc.env:MINE}",
        "HEADER": "Bearer ${oc.env:MINE}",
        "NCCL_DEBUG": "WARN",
    }
    assert composed.config.launcher.environment == kept
    assert CANARY not in repr(composed.layers)
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(composed.config))
    again = recompose(load_config(file), ["training.steps=7"])
    assert again.config.launcher.environment == kept and CANARY not in file.read_text()


def test_a_literal_of_an_older_run_is_refused_until_it_is_a_reference() -> None:
    saved = compose(["recipe=tiny"]).config
    saved.launcher.environment["HF_TOKEN"] = CANARY
    with pytest.raises(TrainctlError) as caught:
        recompose(saved, [])
    assert CANARY not in repr(caught.value.findings)
    mended = recompose(saved, ["launcher.environment.HF_TOKEN=${oc.env:HF_TOKEN}"]).config
    assert mended.launcher.environment == {"HF_TOKEN": "${oc.env:HF_TOKEN}"}


@pytest.mark.parametrize("keys", [{"api_token": CANARY}, {"url": f"https://me:{CANARY}@host/x"}])
def test_a_secret_among_the_keys_of_a_callback_is_refused(keys: dict[str, str]) -> None:
    (found,) = literal_secrets(RunConfig(callbacks={"mine": keys, "removed": None}))
    assert found.key == f"callbacks.mine.{next(iter(keys))}" and CANARY not in repr(found)


REWARD = "objective.rewards.x={kind: function, call: 'm:f', arguments: {a: [{password: %s}]}}"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["recipe=grpo-tiny", REWARD % CANARY], "objective.rewards.x.arguments.a.0.password"),
        (
            ["recipe=tiny", "data=chat", f"data.template_arguments.api_keys=[{CANARY}]"],
            "data.template_arguments.api_keys.0",
        ),
        (
            ["recipe=tiny", "data=chat", f"data.template_arguments.a='https://me:{CANARY}@b/'"],
            "data.template_arguments.a",
        ),
    ],
)
def test_a_secret_among_free_arguments_is_refused(overrides: list[str], key: str) -> None:
    composed = compose_leniently(overrides)
    (found,) = (each for each in composed.findings if each.rule == "TC167")
    assert found.key == key and CANARY not in repr(composed.findings)


def test_what_is_shown_of_an_older_run_has_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = compose(["recipe=grpo-tiny", REWARD % "''"]).config
    config.objective.rewards["x"].arguments["a"][0]["password"] = CANARY  # type: ignore[attr-defined]
    shown = to_plain(without_secrets(config))
    assert shown["objective"]["rewards"]["x"]["arguments"] == {"a": [{"password": "redacted"}]}
    assert shown["objective"]["rewards"]["format"]["pattern"] and CANARY not in repr(shown)
    composed = replace(compose(["recipe=grpo-tiny"]), config=config)
    monkeypatch.setattr("trainctl.cli.config.compose_target", lambda *_, **__: composed)
    for words in ([], ["--json"]):
        assert command(["config", "show", *words]) == 0
        assert CANARY not in capsys.readouterr().out


def test_command_lines_are_shown_without_secrets() -> None:
    assert redact_words(["--token", "a", "--lr", "1", "--api-key=b", "--token", "--lr"]) == [
        "--token", "redacted", "--lr", "1", "--api-key=redacted", "--token", "--lr"
    ]  # fmt: skip
    for plain in ("data.text_key=text", "tokenizer=byte", "launcher.environment.NCCL_DEBUG=INFO"):
        assert redact_setting(plain) == plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("--export=HF_TOKEN=a==,B=c", "--export=HF_TOKEN=redacted,B=c"),
        ("GET 'https://h/a?sig=a%2Fb&c=d': 403", "GET 'https://h/a?sig=redacted&c=d': 403"),
        ("https://h/?X-Amz-Security-Token=x", "https://h/?X-Amz-Security-Token=redacted"),
        ("ftp://u:p@h/?key=1&monkey=2", "ftp://redacted@h/?key=redacted&monkey=2"),
        ("HF_TOKEN=${oc.env:HF_TOKEN} max_tokens=3", "HF_TOKEN=${oc.env:HF_TOKEN} max_tokens=3"),
        ("training.steps=3 data.text_key=body key=3", "training.steps=3 data.text_key=body key=3"),
    ],
)
def test_a_text_is_shown_without_the_secrets_in_it(text: str, shown: str) -> None:
    assert redact_text(text) == shown and redact_text(shown) == shown


def test_words_of_a_program_are_resolved_where_they_are_secrets() -> None:
    words = ["--token", "${oc.env:A}", "own=${oc.env:A}", "--key-file=x", "auth=${oc.env:A}"]
    assert resolve_words(words, {"A": "1"}) == [
        "--token",
        "1",
        "own=${oc.env:A}",
        *words[3:4],
        "auth=1",
    ]
    with pytest.raises(TrainctlError, match="A is not set"):
        resolve_words(words, {})
