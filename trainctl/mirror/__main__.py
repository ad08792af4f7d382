"""`python -m trainctl.mirror RUN_DIR mirror [--follow]`: send a run's checkpoints to its mirror.

`trainctl.runs.companion` says when it sends, and how it ends.
"""

from __future__ import annotations

import sys

from trainctl.mirror.uploader import Uploader
from trainctl.runs.companion import serve

if __name__ == "__main__":
    sys.exit(serve(None, lambda run, _: Uploader(run), prog="python -m trainctl.mirror"))
