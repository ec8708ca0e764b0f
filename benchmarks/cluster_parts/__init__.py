"""The parts of `cluster.py`, one file per question. `worlds.py` and `rank_side.py` serve `broadcast.py` as well."""
