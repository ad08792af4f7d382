"""Cross entropy of the next token: pre-training, and fine-tuning on answers."""

from __future__ import annotations

from trainctl.options.objective import Objective

SPEC = Objective(name="next_token")
