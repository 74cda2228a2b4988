"""From a folder's files to a model's parameters.

pretrained   from a name to a filled model: the way through all of the others
checkpoint   a folder of weights, opened and checked
pickle_free  ``pytorch_model.bin``, read without executing it
loading      which stored tensor is which of ours, decided from headers
filling      the values: one dtype, finite, ties compared, put into the model
on_disk      weights that stay in their files
early        what is begun while torch is imported
source       what a model was read from, kept with it
checksums    what a folder says its files are
"""
