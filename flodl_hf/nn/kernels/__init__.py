"""Triton kernels, and the test that enables them on a device.

`short_texts` is attention among texts that are mostly shorter than a
tile; `rows` the operations between products; `rotary` positions of queries and keys; `disentangled` DeBERTa's
attention; `copies` writes a layer's weights in half precision.
`operations` launches them, with gradients, and `self_test` tests once whether they compute on a device what torch's
operations compute there. Only `self_test` may be imported where Triton is not installed.
"""
