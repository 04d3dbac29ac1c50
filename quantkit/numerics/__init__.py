"""The numbers: formats as data, one readable codec, its fast twin. No I/O, no model knowledge.

Nothing is re-exported here, so that importing `quantkit.numerics.formats` costs neither torch nor
numba.
"""
