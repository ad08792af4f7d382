"""Which documents of a corpus are trained on: measured once in numbers, decided by them afterwards.

`measure` reads each document once and writes columns: hashes, MinHash signatures, statistics of
filters, passages that held-out texts have too. `exact` and `near` find duplicates in them, and
`selection` decides. A threshold that changes reads no text again.
"""
