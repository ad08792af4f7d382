"""Engines, which run the training steps of a rank, and the types they share with the trainer.

Only the folder of an engine imports that engine's package. Changes to other packages are declared
in tables that import nothing, because the command line reads them too.
"""
