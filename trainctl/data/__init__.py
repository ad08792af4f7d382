"""What a run is trained on: sources, their mixture, the order of their samples. No torch here.

What costs much (text to token ids) is done once, before the ranks start, in parts that are each
made by whoever comes to them (`trainctl.data.store`). Which documents are trained on is decided by
numbers that are kept of each (`trainctl.data.quality`). What decides a run is arithmetic: which
sample is where is a function of the seed and a counter (`trainctl.data.order`).
"""
