"""Shipped options, one module each (`trainctl.config.registry`). They import no torch."""
