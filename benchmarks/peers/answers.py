"""The peer's side of `child.py`: a round of cases for every line read, an answer in JSON for every round."""

import json
import sys
from collections.abc import Callable, Mapping

from benchmarks.measure import Json, Samples

Round = Callable[[], Mapping[str, Samples]]


def answer_rounds(facts: Mapping[str, Json], rounds: Mapping[str, Round]) -> None:
    """Say `facts` (versions, what is compared), then run the round that each line of stdin names, until there is none.

    Every answer is one line of stdout: the facts, then for each round ``{case: [time in seconds, ...]}``.
    """
    _answer(facts)
    for line in sys.stdin:
        samples = rounds[line.strip()]()
        _answer({case: list(of_case.times_s) for case, of_case in samples.items()})


def _answer(document: Mapping[str, Json]) -> None:
    print(json.dumps(document), flush=True)
