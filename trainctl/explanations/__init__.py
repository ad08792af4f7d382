"""Texts of the plan rules, of which `scripts/generate_rules.py` makes a page."""
