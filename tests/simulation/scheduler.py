"""Simulated time: processes, their tasks, and one queue of what happens when.

A task is a greenlet, so production code that blocks runs as it is: where it would wait, the scheduler goes on with
whatever is due next, and comes back. Nothing happens between two waits of a task, and the order of all else follows
from the seed alone. A process is a set of tasks that can be stopped and killed; as with SIGKILL, no `finally` of a
killed task runs while the world goes on.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Final

from greenlet import GreenletExit, getcurrent, greenlet

_MOST_STEPS: Final = 300_000


class Process:
    """What dies and stands still as one."""

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.is_alive = True
        self.is_stopped = False
        self.lost_s = 0.0
        """How long it has been stopped, all in all: deadlines of its calls are later by so much."""
        self.stopped_at = 0.0
        self.tasks: Final[set[Task]] = set()
        self.kept_waiting: Final[list[Callable[[], None]]] = []
        self.obituaries: Final[list[Callable[[], None]]] = []
        """What is done when it has ended."""

    def __repr__(self) -> str:
        return self.name


class Task(greenlet):
    """One thread of a process. `name` is for stories; an idle task may still be there when the world is at rest."""

    def __init__(self, process: Process, name: str, run: Callable[[], None], hub: greenlet, *, is_idle: bool) -> None:
        super().__init__(run, hub)
        self.process: Final = process
        self.name: Final = name
        self.is_idle: Final = is_idle
        self.num_waits = 0
        self.is_waiting = False


class Scheduler:
    """The clock, and what is due. `preemption` is how likely a task is to lose its turn at a lock."""

    def __init__(self, rng: Random, *, preemption: float = 0.0) -> None:
        self.rng: Final = rng
        self.now = 0.0
        self.num_steps = 0
        self.after_step: Callable[[], None] = lambda: None
        self.failure: BaseException | None = None
        self._preemption = preemption
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._hub = getcurrent()
        self._is_over = False
        self._graveyard: list[Task] = []
        self._processes: list[Process] = []

    def clock(self) -> float:
        """Seconds, as a monotonic clock gives them."""
        return self.now

    # -- the queue ----------------------------------------------------------------------------------------------------

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        """Have `event` happen in `delay_s` seconds. It must not wait."""
        self._order += 1
        heappush(self._due, (self.now + delay_s, self._order, event))

    def run_until(self, end: float) -> None:
        """Let happen all that is due until then. Raises what a task raised that nobody has caught."""
        while self._due and self._due[0][0] <= end:
            at, _, event = heappop(self._due)
            self.now = max(self.now, at)
            self.num_steps += 1
            if self.num_steps > _MOST_STEPS:
                raise RuntimeError(f"more than {_MOST_STEPS} steps: something goes round and round")
            event()
            if self.failure is not None:
                raise self.failure
            self.after_step()
        self.now = max(self.now, end)

    def jump(self, seconds: float) -> None:
        """The clock goes forward by so much at once: what was due meanwhile is late."""
        self.now += seconds

    # -- processes and tasks ------------------------------------------------------------------------------------------

    def process(self, name: str) -> Process:
        """A new one."""
        process = Process(name)
        self._processes.append(process)
        return process

    def spawn(self, process: Process, name: str, run: Callable[[], object], *, is_idle: bool = False) -> None:
        """Begin a task, as soon as the present one waits. One of a dead process never begins."""
        if not process.is_alive or self._is_over:
            return
        task = Task(process, name, lambda: self._run(task, run), self._hub, is_idle=is_idle)
        process.tasks.add(task)
        self.after(0.0, lambda: self._resume(task, 0))

    def kill(self, process: Process) -> None:
        """End a process at once, stopped or not."""
        process.is_alive = False
        self._graveyard.extend(process.tasks)
        process.tasks.clear()
        process.kept_waiting.clear()
        obituaries, process.obituaries[:] = list(process.obituaries), []
        for event in obituaries:
            event()

    def stop(self, process: Process) -> None:
        """Its tasks do nothing until it is continued."""
        if process.is_alive and not process.is_stopped:
            process.is_stopped, process.stopped_at = True, self.now

    def go_on(self, process: Process) -> None:
        """Continue a stopped process, if it still lives."""
        if process.is_stopped:
            process.is_stopped = False
            process.lost_s += self.now - process.stopped_at
            waiting, process.kept_waiting[:] = list(process.kept_waiting), []
            for event in waiting:
                self.after(0.0, event)

    def busy_tasks(self) -> list[Task]:
        """The tasks that have something to finish."""
        tasks = (task for process in self._processes if process.is_alive for task in process.tasks)
        return [task for task in tasks if not task.is_idle]

    def close(self) -> None:
        """End every task. What they do in their `finally` blocks concerns nobody any more."""
        self._is_over = True
        self.after_step = lambda: None
        for process in self._processes:
            self._graveyard.extend(process.tasks)
            process.tasks.clear()
        for task in self._graveyard:
            if task:
                task.throw(GreenletExit)
        self._graveyard.clear()
        self._due.clear()

    # -- for the task that runs ---------------------------------------------------------------------------------------

    def current(self) -> Task:
        """The task that runs now."""
        task = getcurrent()
        assert isinstance(task, Task), "only a task can wait"
        return task

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until somebody calls `wake` for this task; False if that was not before `timeout_s`."""
        if self._is_over:
            raise GreenletExit
        task = self.current()
        task.num_waits += 1
        task.is_waiting = True
        number, was_woken = task.num_waits, True
        if timeout_s is not None:

            def give_up() -> None:
                nonlocal was_woken
                if task.is_waiting and task.num_waits == number:
                    was_woken = False
                    self._resume(task, number)

            self.after(max(0.0, timeout_s), give_up)
        self._hub.switch()
        if self._is_over:
            raise GreenletExit
        return was_woken

    def wake(self, task: Task) -> None:
        """End the wait of a task, if it waits; it runs when the present one waits itself."""
        if task.is_waiting:
            task.is_waiting = False
            number = task.num_waits
            self.after(0.0, lambda: self._resume(task, number))

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.wait(seconds)

    def preempt(self) -> None:
        """Perhaps let others run: threads lose their turn anywhere, and it matters most around locks."""
        if self._preemption and not self._is_over and self.rng.random() < self._preemption:
            self.wait(self.rng.random() * 0.01)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _resume(self, task: Task, number: int) -> None:
        process = task.process
        if not process.is_alive:
            return
        if process.is_stopped:
            process.kept_waiting.append(lambda: self._resume(task, number))
            return
        if task.num_waits == number:
            task.is_waiting = False
            task.switch()

    def _run(self, task: Task, run: Callable[[], object]) -> None:
        try:
            run()
        except GreenletExit:
            pass
        except BaseException as error:
            if not self._is_over:
                self.failure = error
        finally:
            task.process.tasks.discard(task)
