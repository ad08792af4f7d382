"""Configurations of other trainers, converted to group choices and overrides.

Each tool is data: `tools/TOOL.yaml` says for each of its keys what it becomes here, or why it is
not carried over. What a table cannot say is a function in `conversions/`. DeepSpeed's JSON has its
own import, whose tests render the result back to the JSON.
"""
