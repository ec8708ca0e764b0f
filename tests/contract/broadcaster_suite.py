"""The contract of `Broadcaster` as tests that any implementation inherits.

A test class derives from the suite that fits and defines one fixture::

    class TestMine(ManyRankSuite):
        @pytest.fixture
        def make_world(self) -> MakeWorld: ...   # (world_size, timeout_s) -> one Broadcaster per rank

`OneRankSuite` holds for every implementation, `ManyRankSuite` for those of several ranks, `TagSuite` for those that
find a broadcast by its tag rather than by its order.
"""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias, TypeVar

import pytest
import torch

from lmcache_ray.broadcast.base import Broadcaster
from lmcache_ray.errors import BroadcastAborted, BroadcastError, DeadlineError, InvalidRequestError

MakeWorld: TypeAlias = Callable[[int, float], Sequence[Broadcaster]]
Result = TypeVar("Result")

LONG_S = 30.0  # a deadline that no passing test reaches
SHORT_S = 0.3
OBJECTS = [0, None, "", b"\x00\xff", {"refs": [(1, b"k")], "start": 256}, float("inf"), (), False]


def run_ranks(world: Sequence[Broadcaster], call: Callable[[Broadcaster], Result]) -> list[Result | BaseException]:
    """`call` on every rank at once, each in its own thread: per rank what it returned or raised."""
    with ThreadPoolExecutor(len(world)) as threads:
        futures: list[Future[Result]] = [threads.submit(call, broadcaster) for broadcaster in world]
        return [future.exception() or future.result() for future in futures]


def odd_bytes(dtype: torch.dtype) -> torch.Tensor:
    """256 bytes, every value once, seen as `dtype`: NaNs with payloads and -0.0 among them."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).reshape(2, -1)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


class OneRankSuite:
    """What holds in a world of one rank already."""

    def test_a_lone_rank_has_its_own_object(self, make_world: MakeWorld) -> None:
        (broadcaster,) = make_world(1, LONG_S)
        assert (broadcaster.rank, broadcaster.world_size) == (0, 1)
        for tag in (None, "t"):
            assert broadcaster.broadcast_object({"a": 1}, src=0, tag=tag) == {"a": 1}

    def test_a_lone_rank_keeps_its_tensors(self, make_world: MakeWorld) -> None:
        (broadcaster,) = make_world(1, LONG_S)
        tensor = torch.arange(5)
        broadcaster.broadcast_tensors([tensor], src=0)
        assert tensor.tolist() == [0, 1, 2, 3, 4]

    def test_a_lone_rank_may_abort(self, make_world: MakeWorld) -> None:
        (broadcaster,) = make_world(1, LONG_S)
        broadcaster.abort("nobody listens")
        assert broadcaster.broadcast_object(7, src=0) == 7

    @pytest.mark.parametrize("src", [-1, 1])
    def test_a_source_outside_the_world_is_refused(self, make_world: MakeWorld, src: int) -> None:
        (broadcaster,) = make_world(1, LONG_S)
        with pytest.raises(InvalidRequestError, match=f"src is {src}"):
            broadcaster.broadcast_object(None, src=src)
        with pytest.raises(InvalidRequestError, match=f"src is {src}"):
            broadcaster.broadcast_tensors([], src=src)


class ManyRankSuite(OneRankSuite):
    """What holds in every world."""

    def test_ranks_know_their_place(self, make_world: MakeWorld) -> None:
        world = make_world(3, LONG_S)
        assert [(broadcaster.rank, broadcaster.world_size) for broadcaster in world] == [(0, 3), (1, 3), (2, 3)]

    @pytest.mark.parametrize("tagged", [False, True])
    def test_every_rank_gets_the_object_of_every_source(self, make_world: MakeWorld, tagged: bool) -> None:
        def call(broadcaster: Broadcaster) -> list[object]:
            received = []
            for k, obj in enumerate(OBJECTS):
                src = k % 3
                mine = obj if broadcaster.rank == src else None
                received.append(broadcaster.broadcast_object(mine, src=src, tag=f"t{k}" if tagged else None))
            return received

        assert run_ranks(make_world(3, LONG_S), call) == [OBJECTS] * 3

    @pytest.mark.parametrize(
        "dtype",
        [
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.uint8,
            torch.int8,
            torch.int64,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        ],
    )
    def test_tensors_are_filled_byte_for_byte(self, make_world: MakeWorld, dtype: torch.dtype) -> None:
        sent = odd_bytes(dtype)

        def call(broadcaster: Broadcaster) -> tuple[bytes, bytes]:
            one, other = torch.zeros_like(sent), torch.zeros_like(sent[:1])
            if broadcaster.rank == 1:
                one, other = sent.clone(), sent[1:].clone()
            broadcaster.broadcast_tensors([one, other], src=1)
            return bytes_of(one), bytes_of(other)

        assert run_ranks(make_world(3, LONG_S), call) == [(bytes_of(sent), bytes_of(sent[1:]))] * 3

    def test_strided_views_are_sent_and_filled_in_place(self, make_world: MakeWorld) -> None:
        def call(broadcaster: Broadcaster) -> list[list[int]]:
            whole = torch.arange(12).reshape(3, 4) if broadcaster.rank == 0 else torch.full((3, 4), -1)
            broadcaster.broadcast_tensors([whole.t()[1:3]], src=0)
            return whole.tolist()

        kept = [[-1, 1, 2, -1], [-1, 5, 6, -1], [-1, 9, 10, -1]]
        assert run_ranks(make_world(2, LONG_S), call)[1] == kept

    def test_the_source_is_far_ahead_and_reuses_its_tensor(self, make_world: MakeWorld) -> None:
        source, *receivers = make_world(3, LONG_S)
        tensor = torch.empty(4, dtype=torch.int64)
        for k in range(20):
            source.broadcast_object(k, src=0)
            source.broadcast_tensors([tensor.fill_(k)], src=0)
        tensor.fill_(-1)

        def call(broadcaster: Broadcaster) -> list[tuple[object, list[int]]]:
            received = []
            for _ in range(20):
                obj, room = broadcaster.broadcast_object(None, src=0), torch.empty(4, dtype=torch.int64)
                broadcaster.broadcast_tensors([room], src=0)
                received.append((obj, room.tolist()))
            return received

        assert run_ranks(receivers, call) == [[(k, [k] * 4) for k in range(20)]] * 2

    @pytest.mark.parametrize("tag", [None, "attempt 1"])
    def test_an_abort_reaches_waiting_receivers_at_once(self, make_world: MakeWorld, tag: str | None) -> None:
        def call(broadcaster: Broadcaster) -> object:
            if broadcaster.rank == 0:
                time.sleep(0.05)
                return broadcaster.abort("out of slots", tag=tag)
            return broadcaster.broadcast_object(None, src=0, tag=tag)

        begun = time.monotonic()
        _, *received = run_ranks(make_world(3, LONG_S), call)
        assert time.monotonic() - begun < LONG_S / 3
        for error in received:
            assert isinstance(error, BroadcastAborted)
            assert "out of slots" in str(error)
            assert "rank 0" in str(error)

    def test_an_abort_is_there_for_receivers_that_come_later_whatever_they_expect(self, make_world: MakeWorld) -> None:
        source, one, other = make_world(3, LONG_S)
        source.abort("out of slots")
        room = torch.full((3,), 9)
        with pytest.raises(BroadcastAborted, match="out of slots"):
            one.broadcast_tensors([room], src=0)
        with pytest.raises(BroadcastAborted, match="out of slots"):
            other.broadcast_object(None, src=0)
        assert room.tolist() == [9, 9, 9]

    def test_calls_go_on_after_an_abort(self, make_world: MakeWorld) -> None:
        source, receiver = make_world(2, LONG_S)
        source.broadcast_object("before", src=0)
        source.abort("hiccup")
        source.broadcast_object("after", src=0)
        assert receiver.broadcast_object(None, src=0) == "before"
        with pytest.raises(BroadcastAborted, match="hiccup"):
            receiver.broadcast_object(None, src=0)
        assert receiver.broadcast_object(None, src=0) == "after"

    @pytest.mark.parametrize("tag", [None, "attempt 1"])
    def test_a_silent_source_costs_one_deadline(self, make_world: MakeWorld, tag: str | None) -> None:
        _, receiver = make_world(2, SHORT_S)
        begun = time.monotonic()
        with pytest.raises(DeadlineError, match="rank 0"):
            receiver.broadcast_object(None, src=0, tag=tag)
        assert SHORT_S * 0.9 <= time.monotonic() - begun < SHORT_S + 5

    @pytest.mark.parametrize(
        ("room", "named"),
        [
            ([torch.full((3,), 9)], "2 tensors"),
            ([torch.full((3,), 9), torch.full((4,), 9, dtype=torch.int32)], r"tensors\[1\].*int64.*int32"),
            ([torch.full((3,), 9), torch.full((2, 2), 9)], r"tensors\[1\].*\[4\].*\[2, 2\]"),
            ([], "2 tensors"),
        ],
    )
    def test_tensors_that_do_not_fit_stay_untouched(
        self, make_world: MakeWorld, room: list[torch.Tensor], named: str
    ) -> None:
        source, wrong, right = make_world(3, LONG_S)
        source.broadcast_tensors([torch.arange(3), torch.arange(4)], src=0)
        source.broadcast_object("next", src=0)
        with pytest.raises(BroadcastError, match=named):
            wrong.broadcast_tensors(room, src=0)
        assert all((tensor == 9).all() for tensor in room)
        fitting = [torch.empty(3, dtype=torch.int64), torch.empty(4, dtype=torch.int64)]
        right.broadcast_tensors(fitting, src=0)
        assert [tensor.tolist() for tensor in fitting] == [[0, 1, 2], [0, 1, 2, 3]]
        assert [receiver.broadcast_object(None, src=0) for receiver in (wrong, right)] == ["next", "next"]

    def test_a_receiver_out_of_step_is_told_not_fed(self, make_world: MakeWorld) -> None:
        source, one, other = make_world(3, LONG_S)
        source.broadcast_object("plan", src=0)
        room = torch.full((3,), 9)
        with pytest.raises(BroadcastError, match="expected"):
            one.broadcast_tensors([room], src=0)
        assert room.tolist() == [9, 9, 9]
        source.broadcast_tensors([torch.arange(3)], src=0, tag="x")
        with pytest.raises(BroadcastError):
            other.broadcast_object(None, src=0, tag="x")

    def test_many_broadcasts_from_changing_sources(self, make_world: MakeWorld) -> None:
        def call(broadcaster: Broadcaster) -> list[object]:
            order, received = random.Random(7), []
            for k in range(150):
                src = order.randrange(4)
                mine = broadcaster.rank == src
                if order.random() < 0.5:
                    received.append(broadcaster.broadcast_object((src, k) if mine else None, src=src))
                else:
                    tensor = torch.tensor([src, k]) if mine else torch.zeros(2, dtype=torch.int64)
                    broadcaster.broadcast_tensors([tensor], src=src)
                    received.append(tuple(tensor.tolist()))
            return received

        order, expected = random.Random(7), []
        for k in range(150):
            expected.append((order.randrange(4), k))
            order.random()
        assert run_ranks(make_world(4, LONG_S), call) == [expected] * 4


class TagSuite:
    """What holds where a broadcast is found by its tag."""

    def test_tags_may_be_received_in_any_order(self, make_world: MakeWorld) -> None:
        source, receiver = make_world(2, LONG_S)
        for tag in "abc":
            source.broadcast_object(tag.upper(), src=0, tag=tag)
        assert [receiver.broadcast_object(None, src=0, tag=tag) for tag in "cab"] == ["C", "A", "B"]

    def test_an_abort_concerns_its_tag_only(self, make_world: MakeWorld) -> None:
        source, receiver = make_world(2, LONG_S)
        source.abort("broken", tag="a")
        source.broadcast_object(2, src=0, tag="b")
        assert receiver.broadcast_object(None, src=0, tag="b") == 2
        with pytest.raises(BroadcastAborted, match="broken"):
            receiver.broadcast_object(None, src=0, tag="a")

    def test_a_published_payload_stands(self, make_world: MakeWorld) -> None:
        source, receiver = make_world(2, LONG_S)
        source.broadcast_object(1, src=0, tag="a")
        source.abort("too late", tag="a")
        assert receiver.broadcast_object(None, src=0, tag="a") == 1

    def test_tagged_and_untagged_calls_do_not_meet(self, make_world: MakeWorld) -> None:
        source, receiver = make_world(2, LONG_S)
        source.broadcast_object("first", src=0)
        source.broadcast_object("tagged", src=0, tag="a")
        source.broadcast_object("second", src=0)
        assert receiver.broadcast_object(None, src=0, tag="a") == "tagged"
        assert [receiver.broadcast_object(None, src=0) for _ in range(2)] == ["first", "second"]

    def test_a_tagged_call_that_timed_out_spoils_no_other(self, make_world: MakeWorld) -> None:
        source, receiver = make_world(2, SHORT_S)
        with pytest.raises(DeadlineError):
            receiver.broadcast_object(None, src=0, tag="never")
        source.broadcast_object(1, src=0, tag="a")
        source.broadcast_object(2, src=0)
        assert receiver.broadcast_object(None, src=0, tag="a") == 1
        assert receiver.broadcast_object(None, src=0) == 2
