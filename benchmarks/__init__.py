"""Measurements of dslaunch beside other programs. Each `bench_*.py` is a program of its own;
docs/reference/benchmarks.md has the figures that `--publish` writes.
"""
