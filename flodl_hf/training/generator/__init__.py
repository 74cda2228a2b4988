"""``task="replaced"`` with a generator, ELECTRA's own way of training (Clark et al. 2020, arXiv:2003.10555).

A small model of masked words fills masked places by drawing from what it holds probable; the discriminator says of each
token whether it is the text's own. Both learn in one step.
"""
