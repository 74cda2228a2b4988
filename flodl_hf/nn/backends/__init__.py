"""Backends: tables of operations that run an encoder layer, by torch, on a CPU, on CUDA for prediction and training.

A layer (`flodl_hf.nn.layers`) is written once and defines what is computed; a table defines how. `layers.Table` is the
reference arithmetic, operation by operation; each of those here overrides what its device does better, and its
``lacks(layer)`` returns why it cannot run a layer.
"""
