"""Checkpoints for other people's runtimes: one module per target, one engine that fills the files.

A target says which tensors a quantized layer becomes and what stands beside them. It never reads,
writes or rounds: it turns the rows of a QTensor into bytes, and names them.
"""
