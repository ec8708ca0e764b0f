"""The whole cluster in one thread, on a clock of its own, with faults drawn from a seed: see `world.py`."""
