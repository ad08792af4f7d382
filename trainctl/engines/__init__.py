"""What makes the steps on a rank, and what it and the trainer speak about.

A folder for each engine imports that engine's package, and nothing else does.
"""
