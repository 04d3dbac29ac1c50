"""What a quantized model can be written as: one module or package per target."""
