from cluster.open_plans import OpenPlans
from lmcache_ray.index.plans import ChunkRef, StorePlan


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plan(number: int, *generations: int) -> StorePlan:
    refs = tuple(ChunkRef(bytes([generation]) * 32, generation, generation) for generation in generations)
    return StorePlan(number, refs, tuple(range(len(refs))), 0, 0, ())


def test_a_plan_is_of_its_prompt_until_it_is_closed() -> None:
    plans = OpenPlans(clock=Clock(), keep_s=10)
    plans.open(plan(1, 5), [b"a", b"b"], None)
    plans.open(plan(2, 6), [b"c"], None)
    assert plans.close(1) == [b"a", b"b"]
    assert plans.close(1) == ()
    assert plans.close(2) == [b"c"]
    assert plans.close(99) == ()


def test_a_client_may_write_its_generations_until_it_has_reported() -> None:
    plans = OpenPlans(clock=Clock(), keep_s=10)
    plans.open(plan(1, 5, 6), [b"a"], "client")
    plans.open(plan(2, 7), [b"b"], None)
    assert [plans.writer_of(generation) for generation in (5, 6, 7, 8)] == ["client", "client", None, None]
    plans.close(1)
    assert plans.writer_of(5) is None


def test_plans_without_a_report_are_forgotten_in_time_but_not_those_a_client_may_be_writing() -> None:
    clock = Clock()
    plans = OpenPlans(clock=clock, keep_s=10)
    plans.open(plan(1, 5), [b"a"], None)
    plans.open(plan(2, 6), [b"b"], "client")
    clock.now = 5
    plans.open(plan(3, 7), [b"c"], None)
    clock.now = 10
    plans.prune()
    assert plans.close(1) == [b"a"], "not yet overdue"
    plans.open(plan(4, 8), [b"d"], None)
    clock.now = 16
    plans.prune()
    assert plans.close(3) == ()
    assert plans.close(4) == [b"d"]
    assert plans.writer_of(6) == "client" and plans.close(2) == [b"b"]


def test_a_dead_client_writes_no_more_and_leaves_nothing_behind() -> None:
    """Its slots are quarantined until somebody says that it cannot be writing them; its plans must not pile up."""
    plans = OpenPlans(clock=Clock(), keep_s=10)
    plans.open(plan(1, 5, 6), [b"a"], "dead")
    plans.open(plan(2, 7), [b"b"], "alive")
    plans.forget_writer("dead")
    plans.forget_writer("never seen")
    assert [plans.writer_of(generation) for generation in (5, 6, 7)] == [None, None, "alive"]
    assert plans.close(1) == ()
    assert plans.close(2) == [b"b"]


def test_calls_that_a_living_writer_has_ended_are_forgotten_with_plans_that_it_never_saw() -> None:
    """The answer with plan 1 got lost; the writer's next call says that nothing before it is under way any more."""
    plans = OpenPlans(clock=Clock(), keep_s=10)
    plans.open(plan(1, 5), [b"a"], "client", call=3)
    plans.open(plan(2, 6), [b"b"], "client", call=4)
    plans.open(plan(3, 7), [b"c"], "other", call=0)
    plans.forget_calls("client", before=4)
    assert [plans.writer_of(generation) for generation in (5, 6, 7)] == [None, "client", "other"]
    assert plans.close(1) == () and plans.close(2) == [b"b"]
