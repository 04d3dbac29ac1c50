"""Engines: compile an ONNX file, run it, prove what came out.

`build`, `audit` and `lint` know TensorRT; `lower` and `onnxruntime` run a model on any CPU.
"""
