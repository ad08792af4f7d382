"""One working example of each kind of option: `trainctl new` copies it, docs/options.md shows it.

`GROUP/NAME.py` and `GROUP/NAME.yaml` are the option, `GROUP/test_NAME.py` is its test.
"""
