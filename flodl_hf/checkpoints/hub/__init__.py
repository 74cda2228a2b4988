"""Resolve a name to a local folder, and upload folders: the Hub.

download  a repository's files through the Hub's cache
choosing  the files of a repository that a model needs
request   requests to the Hub: errors, time limits, tokens that only one server gets, model cards, uploads
"""
