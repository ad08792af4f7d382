"""Hook that has ranks of a user's script forked too, beside what `preloaded` has forked.

For scripts that are to train; how a script is started, told its place and ended is tested by
scripts that import nothing, in real processes.
"""

import os
import runpy
import sys
from pathlib import Path

if (
    "RANK" in os.environ
    and os.environ.get("TRAINCTL_TESTS_SERVER_OF") == sys.prefix
    and sys.orig_argv[1:]
    and sys.orig_argv[1].endswith(".py")
):
    import fork_client

    fork_client.main(os.environ["TRAINCTL_TESTS_SERVER"], "script_entry", sys.orig_argv[1:])
runpy.run_path(str(Path(__file__).parents[1] / "preloaded" / "sitecustomize.py"))
