"""Tokenizers: text to ids and windows, settings, tokenizers built from vocabulary files.

Only this package imports the ``tokenizers`` library.
"""
