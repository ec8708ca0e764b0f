"""Our side of a peer: its process, asked for one round at a time.

The peer runs in its own interpreter but its rounds alternate with ours, so that both see the same machine; while one is
timed the other waits for its pipe.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from benchmarks.measure import Json, Samples

_FOLDER = Path(__file__).resolve().parent
_END_S = 10.0  # to a peer that was told to end


class PeerError(RuntimeError):
    """The peer could not be started, or ended before it answered."""


class PeerProcess:
    """A script of this folder under the interpreter `python`, from its start until the end of the `with`.

    `facts` are what it says about itself. Raises `PeerError` at once if it cannot be started; what the peer itself has
    to say about that stands on stderr.
    """

    def __init__(self, python: str, script: str, arguments: Sequence[str] = ()) -> None:
        command = [python, str(_FOLDER / script), *arguments]
        self._script = script
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_FOLDER.parent
            )
        except OSError as error:
            raise PeerError(f"--peer-python {python} cannot be run: {error}") from error
        try:
            self.facts: Mapping[str, Json] = self._answer()
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def round(self, name: str) -> dict[str, Samples]:
        """Run the round of that name; the times of its cases. Raises `PeerError` if the peer ends meanwhile."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{name}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer will not come either, and says why
        return {case: Samples(tuple(times_s)) for case, times_s in self._answer().items()}

    def _answer(self) -> dict[str, list[float]]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait(_END_S)
            raise PeerError(f"{self._script} ended with status {status} instead of answering; see its message above")
        answer: dict[str, list[float]] = json.loads(line)
        return answer

    def _end(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()  # no more rounds
        except BrokenPipeError:
            pass
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
