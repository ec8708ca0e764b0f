"""One script per claim of speed; each prints one JSON document: `python benchmarks/engine.py`, from any folder.

A script first puts the repository's root in the place of its own folder on the path, which Ray's workers then get too:
`import cluster` must find the package of this project and not the script `cluster.py` beside this file. In a script:

    if not __package__:  # run as a script
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
"""
