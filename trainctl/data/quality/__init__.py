"""Selection of training documents: measured once as numbers, then decided from the numbers.

`measurement` reads each document once and writes `columns`: hashes, MinHash signatures, statistics
of filters, passages shared with held-out texts. `duplicates` finds duplicates in the columns, and
`decide` applies the rules. Changing a threshold reads no text again.
"""
