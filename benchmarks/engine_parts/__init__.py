"""The parts of `engine.py`, one file per question; `engines.py` and `turns.py` serve them all."""
