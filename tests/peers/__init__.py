"""Cases of the original libraries, run on both sides; see `tests.peers.command`."""
