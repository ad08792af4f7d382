"""Training data of a run: sources, their mixture, and the order of their samples. No torch here.

Expensive work (text to token ids) is done once, before the ranks start, in parts that any process
can make (`trainctl.data.store`). Training documents are selected by measures that are stored for
each document (`trainctl.data.quality`). The order of samples is arithmetic: the sample at a counter
is a function of the seed and the counter (`trainctl.data.order`).

A mistake of the user is a `TrainctlError`. So is a corpus that is missing, damaged or has changed
(exit code 5), and a disk or server that fails (exit code 4). Docstrings name other exceptions, and
causes that one would not expect.
"""
