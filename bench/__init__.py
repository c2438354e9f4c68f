"""Benchmarks: `python -m bench node|ring [--json] [--quick]`; ratios within one run."""
