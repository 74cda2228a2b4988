"""Backends: tables of operations that run an encoder layer, by torch, on a CPU, on CUDA for prediction and training.

A layer (`flodl_hf.nn.layers.encoder_layer`) is written once and says what is computed; a table says how. That of
`flodl_hf.nn.layers.table` is the reference arithmetic, operation by operation; each of those here overrides what its
device does better, and says by ``lacks(layer)`` why it would not run a layer.
"""
