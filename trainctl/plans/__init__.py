"""Plan: what a run will do, derived and checked before anything starts. Pure, no torch."""
