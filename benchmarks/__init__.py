"""Benchmarks: they assert nothing, and print medians and ratios to a baseline of the same run."""
