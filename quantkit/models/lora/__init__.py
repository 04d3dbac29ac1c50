"""LoRA files: what they change, merged into the weights before anything is quantized. No torch."""
