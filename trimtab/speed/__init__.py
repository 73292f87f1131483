"""Benchmarks: how fast a model answers here, against the stock stack and the memory bandwidth."""
