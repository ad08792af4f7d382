"""Everything that runs on a rank. Importing this package alone loads no torch."""
