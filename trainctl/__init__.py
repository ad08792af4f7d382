"""trainctl: a config-driven launcher and trainer for large models, built on DeepSpeed.

The names of `__all__` are the public API (docs/python.md). They are imported when they are used, so
that `import trainctl` costs nothing.
"""
# Nothing is imported here: `python -m trainctl` takes the current folder off the path after this.

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainctl.api import (
        Checkpoint,
        Plan,
        Run,
        SearchResult,
        add_tokens,
        import_checkpoint,
        import_config,
        launch,
        list_runs,
        load,
        plan,
        prove,
        prove_migration,
        report,
        resume,
        search,
        suspects,
        sweep,
        trial,
    )
    from trainctl.errors import Finding, RunFailed, TrainctlError

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "Finding",
    "Plan",
    "Run",
    "RunFailed",
    "SearchResult",
    "TrainctlError",
    "__version__",
    "add_tokens",
    "import_checkpoint",
    "import_config",
    "launch",
    "list_runs",
    "load",
    "plan",
    "prove",
    "prove_migration",
    "report",
    "resume",
    "search",
    "suspects",
    "sweep",
    "trial",
]


def __getattr__(name: str) -> object:
    if name not in (*__all__, "api"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    api = import_module("trainctl.api")
    value: object = api if name == "api" else getattr(api, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
