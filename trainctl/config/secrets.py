"""Detection of secrets by their names, redaction, and references that only a launch resolves.

What a run writes (`config.yaml`, `plan.json`, `run.json`, `command.json`) is read by colleagues and
by whoever gets a copy. The value of a variable is therefore written only if its name is known to be
plain. Any other variable is given as `${oc.env:NAME}`, and only that text is written.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from trainctl.config.suggest import words
from trainctl.errors import MachineError

REDACTED = "redacted"
ENVIRONMENT = "launcher.environment"
"""Environment variables for ranks; their values are secrets unless the name is plain."""
SECRET_LISTS = ("logging.alerts.urls",)
"""Lists of strings that are always secret."""

PLAIN_VARIABLES = words(
    """
    ACCELERATE_* CC CUBLAS_* CUDA_* CUDNN_* CXX DEEPSPEED_* DS_* FI_* GLOO_* GOMP_* HF_HOME
    HF_HUB_* HIP_* HSA_* HTTP_PROXY HTTPS_PROXY KMP_* LANG LC_* LD_LIBRARY_PATH LD_PRELOAD
    MALLOC_* MAX_JOBS MKL_* NCCL_* NO_PROXY NVIDIA_* OMPI_* OMP_* OPENBLAS_* PATH PYTHON*
    PYTORCH_* RCCL_* ROCR_* TMPDIR TOKENIZERS_PARALLELISM TORCH* TRAINCTL_* TRANSFORMERS_*
    TRITON_* TZ UCX_* XDG_*
    """
)
"""Variables of libraries and systems (globs) whose values are not secret, unless a word in the
name says otherwise. `launcher.plain_environment` adds to them.
"""

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ALWAYS = re.compile(
    r"SECRETS?|PASS(WORD|WD|WORDS|PHRASE|CODE)?|PASSW\w*|PAT|(O?AUTH)\d?|AUTHORI[SZ]ATION|BEARER|"
    r"JWTS?|CREDENTIALS?|CREDS?|(API|ACCESS|PRIVATE|SECRET|SSH|SIGNING)(KEY|TOKEN)S?|"
    r"\w+(TOKEN|SECRET|PASSWORD)"
)
"""Words in a name that always mean a secret."""

_NO_KEY_BEFORE = re.compile(
    r"CACHE|CHAT|COLUMN|CONTENT|DATA|DATASET|EXPERIMENT|FIELD|FOREIGN|GROUP|HOT|ID|"
    r"IMAGE|INPUT|JSON|LABEL|MESSAGE|MESSAGES|NUM|OUTPUT|PRIMARY|PROMPT|QUERY|"
    r"RESPONSE|SAMPLE|SHARD|SORT|TARGET|TEXT|VALUE"
)
_NO_KEY_AFTER = re.compile(r"DIM|HEADS|LENGTH|NAME|PADDING|SIZE|VALUE|VALUES")
_NO_TOKEN_BEFORE = re.compile(
    r"ADDED|BOS|CLS|DOCUMENT|END|EOS|EVERY|FIRST|IMAGE|LAST|MASK|MAX|MIN|NEXT|"
    r"NUM|PAD|PER|SEP|SPECIAL|START|UNK"
)
_NO_TOKEN_AFTER = re.compile(
    r"BUDGET|COUNT|DIM|DROP|DROPOUT|EMBEDDING|EMBEDDINGS|ID|IDS|LENGTH|LIMIT|LR|"
    r"SIZE|TYPE"
)
URL_PASSWORD = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
"""User and password in a URL."""
_PAIR = re.compile(r"([A-Za-z_][\w.-]*)=([^\s,&;#'\"()\[\]{}<>]*)")
"""A name with its value, in the query of a URL, an option or a list of variables."""
_SIGNATURES = re.compile(r"(^|[_-])(SIG|SIGNATURE|KEY)$", re.IGNORECASE)
"""More names of secrets in URL queries: `sig` (Azure), `X-Amz-Signature`, `key`."""
_REFERENCE = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}")


def is_secret_name(name: str) -> bool:
    """Whether the words in a name say that its value is a secret.

    >>> [is_secret_name(name) for name in ("HF_TOKEN", "apiKey", "SLURM_JWT", "--db-password")]
    [True, True, True, True]
    >>> [is_secret_name(name) for name in ("tokenizer", "text_key", "num_key_value_heads")]
    [False, False, False]
    """
    words = [word.upper() for word in _WORDS.findall(name)]
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        if _ALWAYS.fullmatch(word):
            return True
        if word in ("KEY", "KEYS") and len(words) > 1:
            if not (_NO_KEY_BEFORE.fullmatch(before) or _NO_KEY_AFTER.fullmatch(after)):
                return True
        elif word == "TOKEN" and not (
            _NO_TOKEN_BEFORE.fullmatch(before) or _NO_TOKEN_AFTER.fullmatch(after)
        ):
            return True
    return False


def is_plain_variable(name: str, plain: Iterable[str] = ()) -> bool:
    """Whether the value of a variable may be written.

    Args:
        plain: Globs of the user's. A full name among them makes a variable plain even if its name
            looks secret.
    """
    own = tuple(plain)
    if name in own:
        return True
    known = (*PLAIN_VARIABLES, *own)
    return not is_secret_name(name) and any(fnmatch.fnmatchcase(name, glob) for glob in known)


def names_in(text: str) -> list[str]:
    """Return the names of variables that a text refers to by `${oc.env:NAME}`."""
    return _REFERENCE.findall(text)


def is_env_reference(text: object) -> bool:
    """Whether a text refers to environment variables only, so that a launch can resolve it."""
    return isinstance(text, str) and "${" in text and "${" not in _REFERENCE.sub("", text)


def is_env_reference_list(value: object) -> bool:
    """Whether a list, or a list as typed, consists of references to variables only."""
    if isinstance(value, str):
        return is_env_reference(value) and not re.search(r"\w", _REFERENCE.sub("", value))
    return isinstance(value, list) and all(
        is_env_reference(each) and not _REFERENCE.sub("", each) for each in value
    )


def resolve_text(text: str, environment: Mapping[str, str]) -> str:
    """Replace the references to variables in a text by their values.

    Raises:
        TrainctlError: A variable is not set (exit code 4).
    """
    if not is_env_reference(text):
        return text
    for name in names_in(text):
        if name not in environment:
            raise MachineError(
                f"{text} cannot be resolved: {name} is not set here",
                hint=f"export {name}, and start this again",
            )
    return _REFERENCE.sub(lambda found: environment[found[1]], text)


def resolve_variables(
    variables: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of `launcher.environment` with references resolved.

    Raises:
        TrainctlError: A variable is not set (exit code 4).
    """
    return {name: resolve_text(value, environment) for name, value in variables.items()}


def redact_text(text: str) -> str:
    """Redact passwords and signatures in URLs, and values assigned to secret names.

    >>> redact_text("cannot read https://me:pw@host/a.txt?part=1&sig=ab%2F")
    'cannot read https://redacted@host/a.txt?part=1&sig=redacted'
    >>> redact_text("--export=HOME,HF_TOKEN=ab==")
    '--export=HOME,HF_TOKEN=redacted'
    """

    def hide(found: re.Match[str]) -> str:
        name, value = found.groups()
        before = found.string[: found.start()][-1:]
        is_signature = before in ("?", "&") and _SIGNATURES.search(name)
        if value and not value.startswith("$") and (is_signature or is_secret_name(name)):
            return f"{name}={REDACTED}"
        return f"{name}={_PAIR.sub(hide, value)}"

    return _PAIR.sub(hide, URL_PASSWORD.sub(REDACTED, text))


def redact_setting(text: str) -> str:
    """Redact an override, or a word of a command line.

    >>> redact_setting("launcher.environment.HF_TOKEN=abc")
    'launcher.environment.HF_TOKEN=redacted'
    >>> redact_setting("launcher.environment={A: b}"), redact_setting("tokenizer=byte")
    ('launcher.environment=redacted', 'tokenizer=byte')
    """
    name, mark, value = _split_setting(text)
    is_single = not value.lstrip().startswith(("{", "["))
    if not mark or (is_single and is_env_reference(value)):
        return redact_text(text)
    key = name.strip().lstrip("+~")
    if (
        _may_be_secret_list(key)
        and not is_env_reference_list(value)
        and value.strip() not in ("", "[]")
    ):
        return f"{name}{mark}{REDACTED}"
    if _holds_variables(key) and not is_plain_variable(key.rpartition(".")[2]):
        return f"{name}{mark}{REDACTED}"
    is_list = key == "script_arguments" and any(secret_words(re.split(r"[\[\],]\s*", value)))
    if is_list or is_secret_name(key.rpartition(".")[2]) or _has_secret_name(value):
        return f"{name}{mark}{REDACTED}"
    return redact_text(text)


def redact_words(words: Sequence[str]) -> list[str]:
    """Redact a command line, including the value in `--name value` for secret names."""
    return [
        REDACTED if follows and not is_env_reference(word) else redact_setting(word)
        for word, follows in _words_and_secrecy(words)
    ]


def resolve_words(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Resolve references in those arguments of a program whose option has a secret name.

    All other arguments belong to the program, even if they look like references.

    Raises:
        TrainctlError: A variable is not set (exit code 4).
    """
    return [
        resolve_text(word, environment) if is_secret else word
        for word, is_secret in zip(words, secret_words(words), strict=True)
    ]


def secret_words(words: Sequence[str]) -> list[bool]:
    """Return, for each word of a command line, whether it contains the value of a secret option."""
    return [
        follows or ("=" in word and is_secret_name(word.partition("=")[0]))
        for word, follows in _words_and_secrecy(words)
    ]


def _words_and_secrecy(words: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield each word, and whether it is the value of a preceding option with a secret name."""
    is_value = False
    for word in words:
        yield word, is_value and not word.startswith("-")
        is_value = word.startswith("-") and "=" not in word and is_secret_name(word)


def _split_setting(text: str) -> tuple[str, str, str]:
    """Split at the first `=`, or at a `:` probably typed instead of it."""
    name, mark, value = text.partition("=")
    if not mark and re.match(r"[\w.]+:(?!//)", text):
        name, mark, value = text.partition(":")
    return name, mark, value


def _may_be_secret_list(key: str) -> bool:
    """Whether a key is one of `SECRET_LISTS`, or a section that contains one."""
    return any(name == key or name.startswith(f"{key}.") for name in SECRET_LISTS)


def _holds_variables(key: str) -> bool:
    return key == ENVIRONMENT or key.startswith((f"{ENVIRONMENT}.", "environment."))


def _has_secret_name(value: str) -> bool:
    names = re.findall(r"([\w.\-]+)['\"]?\s*:(?!//)", value) if "{" in value else ()
    return any(map(is_secret_name, names))
