"""Explanations of rules, records, causes of failures and exit codes.

Texts only, one table for each; `lookup` finds a word in them for `trainctl explain`, and
`scripts/generate_rules.py` makes pages of them. Nothing here imports another room but `errors`.
"""
