"""Readers of quantized checkpoints, one module per layout."""
