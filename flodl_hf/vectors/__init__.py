"""Vectors of texts: what they are trained by, judged by, searched with and written as."""
