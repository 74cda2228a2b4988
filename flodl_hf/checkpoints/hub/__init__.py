"""From a name to a local folder, and back: the Hub.

folders   a name becomes a folder; which of its files a model needs
download  a repository's files through the Hub's cache
request   what is asked of the Hub, and what is said where it fails
origin    to which server a token goes
patience  how long a call over the network may take
upload    a local folder to the Hub
"""
