"""Functions that convert what a table cannot say: several keys of a source together.

`convert: MODULE.FUNCTION` names one. It is called once for a document, whether or not the document
has its keys, since the defaults of the other program may matter. Its keys count as carried over
unless it leaves them out.
"""
