"""What makes the steps on a rank, and what it and the trainer speak about.

A folder for each engine imports that engine's package, and nothing else does. What is changed in
other packages is declared in tables, which import nothing: the command line reads them too.
"""
