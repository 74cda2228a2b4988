"""Resolve a name to a local folder, and upload folders: the Hub.

folders   resolve a name to a folder; select the files that a model needs
download  a repository's files through the Hub's cache
request   requests to the Hub: their errors, time limits, and tokens that only one server gets
upload    a local folder to the Hub
"""
