"""What stands behind [flodl_hf.tokenizer][]: rows, windows, settings, tokenizers built from vocabulary files.

Only this package and ``flodl_hf/tokenizer.py`` import the ``tokenizers`` library.
"""
