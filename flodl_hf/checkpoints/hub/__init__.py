"""Resolve a name to a local folder, and upload folders: the Hub.

folders   resolve a name to a folder; select the files that a model needs
download  a repository's files through the Hub's cache
request   a request to the Hub, and the errors for its failures
origin    restrict a token to one server
timeouts  time limits for network calls
upload    a local folder to the Hub
"""
