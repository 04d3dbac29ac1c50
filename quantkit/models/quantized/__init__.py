"""Readers of quantized checkpoints, one module per layout; `open_quantized` picks the reader."""

from quantkit.models.quantized.open import LAYOUTS, Quantized, open_checkpoint, open_quantized

__all__ = ["LAYOUTS", "Quantized", "open_checkpoint", "open_quantized"]
