"""Other libraries that benchmarks measure beside this package; each is optional."""
