"""The parts of `benchmarks/disk.py`."""
