"""Benchmarks: measure what decoding costs, as ratios within one run. README.md describes them."""
