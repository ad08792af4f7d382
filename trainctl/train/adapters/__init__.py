"""Adapters and quantized base weights."""
