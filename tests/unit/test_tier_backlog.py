"""What waits to be copied to a tier below: in which order it goes, what is let go, and which slots it holds."""

from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.tiers.backlog import Backlog, HeldBack
from tests.unit.index_builders import names


def group(text: str, first_slot: int = 0, generation: int = 1) -> list[ChunkRef]:
    """One chunk a letter, in slots that follow one another."""
    return [ChunkRef(letter.encode(), first_slot + place, generation) for place, letter in enumerate(text)]


def held(backlog: Backlog) -> list[int]:
    return [slot for slot in range(20) if slot in backlog]


def test_groups_go_in_the_order_in_which_they_came_and_each_once() -> None:
    backlog = Backlog()
    for text, slot in (("ab", 0), ("c", 2), ("de", 3)):
        backlog.add(group(text, slot))
    assert (len(backlog), backlog.is_waiting) == (5, True)
    assert [names(backlog.take()) for _ in range(4)] == ["ab", "c", "de", ""]
    assert not backlog.is_waiting


def test_a_chunk_is_held_until_it_is_done_also_on_its_way() -> None:
    backlog = Backlog()
    backlog.add(group("abc"))
    taken = backlog.take()
    assert held(backlog) == [0, 1, 2]
    backlog.done(taken[:2])
    assert (held(backlog), len(backlog)) == ([2], 1)
    backlog.done(taken)
    assert (held(backlog), len(backlog), backlog.num_dropped) == ([], 0, 0)


def test_what_was_forgotten_while_it_waited_is_not_taken() -> None:
    backlog = Backlog()
    backlog.add(group("abc"))
    backlog.add(group("de", 3))
    backlog.done(group("abc")[1:])
    assert names(backlog.take()) == "a"
    backlog.add(group("f", 5))
    backlog.done(group("de", 3))
    assert names(backlog.take()) == "f", "an empty group is nothing to do"


def test_another_use_of_a_slot_is_another_chunk() -> None:
    backlog = Backlog()
    old, new = group("a", generation=1), group("b", generation=2)
    backlog.add(old)
    backlog.done(old)
    backlog.add(new)
    backlog.done(old)
    assert held(backlog) == [0]
    assert [names(backlog.take()) for _ in range(2)] == ["b", ""], "the first group is of the slot's earlier use"


def test_tails_are_let_go_first_and_what_is_on_its_way_is_not() -> None:
    backlog = Backlog()
    for text, slot in (("ab", 0), ("cd", 2), ("e", 4)):
        backlog.add(group(text, slot))
    taken = backlog.take()
    assert backlog.drop_oldest() is True
    assert (held(backlog), backlog.num_dropped) == ([0, 1, 2, 4], 1)
    assert backlog.drop_oldest() is True
    assert (held(backlog), backlog.num_dropped) == ([0, 1, 2], 2), "the head waits behind what came later"
    assert [backlog.drop_oldest(), backlog.drop_oldest()] == [True, False]
    assert (held(backlog), backlog.num_dropped, backlog.is_waiting) == ([0, 1], 3, False)
    backlog.done(taken)
    assert (backlog.drop_oldest(), backlog.num_dropped) == (False, 3)


def test_a_group_that_is_forgotten_by_then_is_not_the_oldest() -> None:
    backlog = Backlog()
    backlog.add(group("ab"))
    backlog.add(group("c", 2))
    backlog.done(group("ab"))
    assert backlog.drop_oldest() is True
    assert (held(backlog), backlog.num_dropped) == ([], 1)


def test_all_can_be_let_go_at_once() -> None:
    backlog = Backlog()
    backlog.add(group("ab"))
    taken = backlog.take()
    backlog.add(group("c", 2))
    assert backlog.drop_all() == 3
    assert (len(backlog), backlog.is_waiting, backlog.num_dropped, held(backlog)) == (0, False, 3, [])
    backlog.done(taken)
    assert (backlog.drop_all(), backlog.num_dropped) == (0, 3)


def test_one_view_of_several_backlogs_follows_them() -> None:
    first, second = Backlog(), Backlog()
    view = HeldBack([first, second])
    first.add(group("ab"))
    second.add(group("bc", 1))
    assert [slot in view for slot in range(4)] == [True, True, True, False]
    assert len(view) == 2, "of three: never more than there are"
    first.drop_all()
    assert [slot in view for slot in range(4)] == [False, True, True, False]
    assert 0 not in HeldBack([]) and len(HeldBack([])) == 0


def test_what_was_let_go_is_remembered_as_long_as_its_slot_has_it_and_taken_once() -> None:
    backlog = Backlog()
    backlog.add(group("ab"))
    backlog.drop_all()
    assert backlog.take_missed(group("ab", generation=2)) == [], "another chunk is in that slot"
    assert names(backlog.take_missed(group("bc", 1))) == "b"
    assert names(backlog.take_missed(group("ab"))) == "a"
    assert backlog.take_missed(group("ab")) == []


def test_a_chunk_that_was_missed_while_it_waited_and_is_used_again_may_be_named_twice() -> None:
    backlog = Backlog()
    backlog.add(group("ab"))
    backlog.miss(group("ab"))
    backlog.add(backlog.take_missed(group("ab")))
    taken = [*backlog.take(), *backlog.take()]
    assert names(taken) == "abab"
    backlog.done(taken)
    assert len(backlog) == 0
