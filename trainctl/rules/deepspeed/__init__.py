"""Rules of DeepSpeed's JSON, by subject; importing the package registers them.

Each checks a `Case`. They mirror DeepSpeed's behaviour: what it refuses only after the processes
have started, and what it accepts but treats unexpectedly.
"""

from trainctl.rules.deepspeed import batch, engine, keys, offload, optimizer, precision, zero
