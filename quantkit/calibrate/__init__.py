"""Calibration: data through the model, statistics out.

`data` finds batches, `observe` runs them and returns what each layer saw, `stream` lends the
weights of a model that does not fit in memory, one layer at a time.
"""
