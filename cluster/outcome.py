"""What every command of `python -m cluster` answers. Apart, so that a command without a cluster needs no Ray."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command answers: the JSON that `--json` prints, and the exit status."""

    as_json: dict[str, object]
    exit_status: int = 0
