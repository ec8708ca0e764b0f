"""Other caches, run by their own interpreter (`--peer-python`). The scripts here never import this project's packages.

`child.py` is our side: it starts such a script and asks it for one round at a time.
"""
