"""Tables of operations that run an encoder layer: torch's own, a processor's, CUDA's for prediction and for training.

A layer (`flodl_hf.encoder_layer`) is written once and says what is computed; a table says how. `table.Table` is the
reference arithmetic, operation by operation; each of the others overrides what its device does better, and says by
``lacks(layer)`` why it would not run a layer.
"""
