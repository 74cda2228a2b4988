"""Models of sentence-transformers: settings of their folders in addition to the encoder.

recipe    pooling, dense layers, prompts and normalisation
steps     layers of vectors
vectors   sparse vectors (SPLADE), and a vector for each token (ColBERT)
settings  modules and routes, how the transformer is loaded, and the files of a module
writing   the small files of a folder, from a recipe
"""
