"""A driver for tests that kill one: connects to a cluster, holds views of a prompt, says so, and waits for its end.

    python view_program.py NAME NAMESPACE NUM_TOKENS

Prints "holding N", N being the tokens it sees. Run where PYTHONPATH leads to the project.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cluster.client import CacheCluster


def main() -> None:
    """Holds views until killed."""
    name, namespace, num_tokens = sys.argv[1:]
    cluster = CacheCluster.connect(name, namespace=namespace)
    found = cluster.get(list(range(int(num_tokens))), views=True)
    print(f"holding {found.num_tokens}", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
