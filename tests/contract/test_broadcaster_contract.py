"""Every broadcaster of the library against the contract, and what is particular to each."""

import threading
import time
import weakref

import pytest
import torch

from lmcache_ray.broadcast.base import Broadcaster
from lmcache_ray.broadcast.callables import CallableBroadcaster, broadcast_fns
from lmcache_ray.broadcast.inprocess import InProcessGroup
from lmcache_ray.broadcast.single import SingleRankBroadcaster
from lmcache_ray.errors import BroadcastAborted, ConfigError, DeadlineError, InvalidRequestError
from tests.contract.broadcaster_suite import (
    LONG_S,
    SHORT_S,
    MakeWorld,
    ManyRankSuite,
    OneRankSuite,
    TagSuite,
    run_ranks,
)


def ends_of(group: InProcessGroup, world_size: int) -> list[Broadcaster]:
    return [group.broadcaster(rank) for rank in range(world_size)]


def in_process(world_size: int, timeout_s: float) -> list[Broadcaster]:
    return ends_of(InProcessGroup(world_size, timeout_s), world_size)


def over_callables(world_size: int, timeout_s: float) -> list[Broadcaster]:
    ends = in_process(world_size, timeout_s)
    return [CallableBroadcaster(end.rank, world_size, *broadcast_fns(end)) for end in ends]


class TestSingleRank(OneRankSuite):
    @pytest.fixture
    def make_world(self) -> MakeWorld:
        return lambda world_size, timeout_s: [SingleRankBroadcaster()]


class TestCallables(ManyRankSuite):
    @pytest.fixture
    def make_world(self) -> MakeWorld:
        return over_callables

    def test_an_unexpected_tag_is_not_taken_for_ones_own(self) -> None:
        source, receiver = over_callables(2, LONG_S)
        source.broadcast_tensors([torch.arange(3)], src=0, tag="attempt 1")
        source.broadcast_object("next", src=0)
        room = torch.full((3,), 9)
        with pytest.raises(BroadcastAborted, match=r"tensors of tag 'attempt 1'.*'attempt 2'"):
            receiver.broadcast_tensors([room], src=0, tag="attempt 2")
        assert room.tolist() == [9, 9, 9]
        assert receiver.broadcast_object(None, src=0) == "next"

    def test_a_partner_that_does_not_speak_the_protocol_is_an_abort(self) -> None:
        receiver = CallableBroadcaster(1, 2, lambda tensor, src: None, lambda obj, src: "raw")
        with pytest.raises(BroadcastAborted, match="'raw'"):
            receiver.broadcast_object(None, src=0)

    def test_a_rank_outside_the_world_is_refused(self) -> None:
        with pytest.raises(InvalidRequestError, match="rank is 2"):
            CallableBroadcaster(2, 2, lambda tensor, src: None, lambda obj, src: obj)


class TestInProcess(ManyRankSuite, TagSuite):
    @pytest.fixture
    def make_world(self) -> MakeWorld:
        return in_process

    def test_ends_are_handed_out_once_per_rank(self) -> None:
        group = InProcessGroup(2, LONG_S)
        assert group.broadcaster(1) is group.broadcaster(1)
        with pytest.raises(InvalidRequestError, match="rank is 2"):
            group.broadcaster(2)
        with pytest.raises(ConfigError, match="world_size is 0"):
            InProcessGroup(0, LONG_S)
        with pytest.raises(ConfigError, match="timeout_s is 0"):
            InProcessGroup(2, 0)

    def test_a_lost_source_frees_its_receivers(self) -> None:
        group = InProcessGroup(3, LONG_S)
        _, *receivers = ends_of(group, 3)
        threading.Timer(0.05, group.rank_lost, [0]).start()
        begun = time.monotonic()
        errors = run_ranks(receivers, lambda end: end.broadcast_object(None, src=0, tag="a"))
        assert time.monotonic() - begun < LONG_S / 3
        assert all(isinstance(error, BroadcastAborted) and "rank 0" in str(error) for error in errors)
        group.rank_back(0)
        group.broadcaster(0).broadcast_object(5, src=0, tag="b")
        assert run_ranks(receivers, lambda end: end.broadcast_object(None, src=0, tag="b")) == [5, 5]

    def test_one_rank_out_of_patience_breaks_the_session_until_all_have_been_told(self) -> None:
        group = InProcessGroup(3, SHORT_S)
        source, one, other = ends_of(group, 3)
        with pytest.raises(DeadlineError):
            one.broadcast_object(None, src=0)
        assert "rank 1 waited" in group.session_fault
        with pytest.raises(BroadcastAborted, match="rank 1 waited"):
            source.broadcast_object("late", src=0)
        with pytest.raises(BroadcastAborted, match="rank 1 waited"):
            other.broadcast_object(None, src=0)

        assert group.session_fault == "", "all have been told"
        world = [source, one, other]
        assert (
            run_ranks(world, lambda end: end.broadcast_object("new" if end is source else None, src=0)) == ["new"] * 3
        )

    def test_a_rank_that_expects_another_source_frees_the_others(self) -> None:
        group = InProcessGroup(3, LONG_S)
        source_named_by = {1: 2, 2: 0}
        begun = time.monotonic()
        errors = run_ranks(ends_of(group, 3)[1:], lambda end: end.broadcast_object(None, src=source_named_by[end.rank]))
        assert time.monotonic() - begun < LONG_S / 3
        assert all(isinstance(error, BroadcastAborted) and "disagree" in str(error) for error in errors)

    def test_what_nobody_reads_is_dropped_in_time(self) -> None:
        group = InProcessGroup(2, 0.1)
        source, receiver = ends_of(group, 2)
        payload = threading.Event()
        watched = weakref.ref(payload)
        source.broadcast_object(payload, src=0, tag="unread")
        del payload
        assert watched() is not None
        time.sleep(0.45)
        source.broadcast_object(None, src=0, tag="later")  # any call looks at the clock
        assert watched() is None
        with pytest.raises(BroadcastAborted, match="not taken"):
            receiver.broadcast_object(None, src=0, tag="unread")
