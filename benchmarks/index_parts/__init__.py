"""The parts of `index_scale.py`, one file per question."""
