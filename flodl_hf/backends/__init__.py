"""Backends: tables of operations that run an encoder layer, by torch, on a CPU, on CUDA for prediction and training.

A layer (`flodl_hf.encoder.layer`) is written once and says what is computed; a table says how. `reference.Table` is the
reference arithmetic, operation by operation; each of the others overrides what its device does better, and says by
``lacks(layer)`` why it would not run a layer.
"""
