"""Measurements, each a script of its own: ``python -m benchmarks.NAME --help``."""
