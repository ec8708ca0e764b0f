"""The parts of `cluster.py` and `broadcast.py`, one file per question; `worlds.py` and `rank_side.py` serve them all."""
