"""The corpus as tokens: what reads and checks them. No torch."""
