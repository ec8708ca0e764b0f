"""The broadcast state machine, with integers for time."""

import gc
import re
import weakref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lmcache_ray.broadcast.log import BroadcastLog
from lmcache_ray.broadcast.tags import Aborted, NamedTag, Payload, Pending, SessionTag
from lmcache_ray.errors import BroadcastAborted, ProtocolError

TTL = 10.0


class Thing:
    """A payload that can be watched."""


@pytest.fixture
def log():
    log = BroadcastLog("e1", 3, ttl_s=TTL)
    yield log
    log.check_integrity()


def named(name="a", src=0, epoch="e1"):
    return NamedTag(epoch, src, name)


def step(sequence, src=0, session=0):
    return SessionTag("e1", src, session, sequence)


def published_thing(log, tag, now=0.0):
    thing = Thing()
    log.publish(tag, thing, now)
    return weakref.ref(thing)


def is_dropped(reference):
    gc.collect()
    return reference() is None


def reason_of(result):
    assert isinstance(result, Aborted), result
    return result.reason


def test_receivers_may_come_before_and_after(log):
    assert log.take(named(), 1, 0) == Pending()
    log.publish(named(), "plan", 1)
    assert log.take(named(), 1, 2) == log.take(named(), 2, 3) == Payload("plan")


def test_none_is_a_payload(log):
    log.publish(named(), None, 0)
    assert log.take(named(), 1, 0) == Payload(None)


def test_asking_again_gives_the_payload_until_the_last_receiver_took_it(log):
    payload = published_thing(log, named())
    assert log.take(named(), 1, 0) == log.take(named(), 1, 0)
    assert not is_dropped(payload)
    log.take(named(), 2, 0)
    assert is_dropped(payload)
    assert "every receiver" in reason_of(log.take(named(), 1, 0))


@pytest.mark.parametrize("tags", [[named(str(k)) for k in range(50)], [step(k) for k in range(50)]])
def test_a_fast_source_may_be_far_ahead(log, tags):
    for k, tag in enumerate(tags):
        log.publish(tag, k, 0)
    for rank in (1, 2):
        assert [log.take(tag, rank, TTL - 1) for tag in tags] == [Payload(k) for k in range(50)]


def test_a_failure_is_published_too(log):
    assert log.take(named(), 1, 0) == Pending()
    log.fail(named(), "disk on fire", 1)
    assert "rank 0 failed: disk on fire" in reason_of(log.take(named(), 1, 1))
    assert "disk on fire" in reason_of(log.take(named(), 2, 1))
    with pytest.raises(BroadcastAborted, match="disk on fire"):
        log.publish(named(), "late", 2)


def test_a_published_payload_stands(log):
    log.publish(named(), "plan", 0)
    log.fail(named(), "too late", 0)
    assert log.take(named(), 1, 0) == Payload("plan")
    with pytest.raises(ProtocolError, match="twice"):
        log.publish(named(), "other", 0)
    assert log.take(named(), 2, 0) == Payload("plan")


def test_an_unknown_epoch_is_answered_at_once(log):
    old = named(epoch="e0")
    assert "e0" in reason_of(log.take(old, 1, 0))
    with pytest.raises(BroadcastAborted, match="e0"):
        log.publish(old, "x", 0)
    assert log.take(named(), 1, 0) == Pending()


def test_a_lost_source_aborts_what_it_owes_and_only_that(log):
    log.take(named("owed"), 1, 0)
    log.publish(named("sent"), "plan", 0)
    log.take(named("of another", src=2), 1, 0)
    log.source_lost(0, 1)
    assert "lost" in reason_of(log.take(named("owed"), 1, 1))
    assert "lost" in reason_of(log.take(named("future"), 1, 1))
    assert log.take(named("sent"), 1, 1) == Payload("plan")
    assert log.take(named("of another", src=2), 1, 1) == Pending()
    with pytest.raises(BroadcastAborted, match="lost"):
        log.publish(named("owed"), "from the dead", 1)


def test_a_source_that_is_back_publishes_anew_but_its_old_debts_stay_aborted(log):
    log.take(named("owed"), 1, 0)
    log.source_lost(0, 1)
    log.source_back(0)
    assert "lost" in reason_of(log.take(named("owed"), 1, 1))
    log.publish(named("new"), 5, 1)
    assert log.take(named("new"), 1, 1) == Payload(5)


def test_a_lost_receiver_is_only_left_out(log):
    first = published_thing(log, named("a"))
    log.take(named("a"), 1, 0)
    log.receiver_lost(2)
    assert is_dropped(first)
    second = published_thing(log, named("b"))
    assert isinstance(log.take(named("b"), 1, 0), Payload)
    assert is_dropped(second)
    log.receiver_back(2)
    third = published_thing(log, named("c"))
    log.take(named("c"), 1, 0)
    assert not is_dropped(third)


def test_without_receivers_nothing_is_kept(log):
    log.receiver_lost(1)
    log.receiver_lost(2)
    assert is_dropped(published_thing(log, named()))
    alone = BroadcastLog(0, 1, ttl_s=1)
    assert is_dropped(published_thing(alone, NamedTag(0, 0, "a")))


def test_an_unread_payload_expires_and_late_receivers_are_told(log):
    payload = published_thing(log, named(), now=0)
    log.take(named(), 1, 5)
    log.expire(TTL - 0.1)
    assert not is_dropped(payload)
    log.expire(TTL)
    assert is_dropped(payload)
    assert "not taken by ranks {2} within 10 s" in reason_of(log.take(named(), 2, TTL))
    log.expire(2 * TTL)
    assert log.take(named(), 2, 2 * TTL) == Pending()  # forgotten


def test_publishing_renews_the_expiry(log):
    log.take(named("x"), 1, 0)
    log.take(named("y"), 1, 1)
    log.publish(named("x"), 7, 9)
    log.expire(12)
    assert log.take(named("x"), 1, 12) == Payload(7)
    assert "not published" in reason_of(log.take(named("y"), 1, 12))


def test_ranks_that_name_different_sources_are_told_at_once(log):
    log.take(named(src=0), 1, 0)
    with pytest.raises(BroadcastAborted, match="disagree"):
        log.publish(named(src=2), "x", 0)
    assert "disagree" in reason_of(log.take(named(src=0), 1, 0))


def test_misuse_is_an_error(log):
    with pytest.raises(ProtocolError, match="rank 3 is not in a world of 3"):
        log.take(named(), 3, 0)
    with pytest.raises(ProtocolError, match="rank 5"):
        log.publish(named(src=5), "x", 0)
    with pytest.raises(ProtocolError, match="it cannot take"):
        log.take(named(src=0), 0, 0)


def test_a_session_counts_each_rank_apart(log):
    log.publish(step(0), "a", 0)
    assert log.take(step(0), 1, 0) == Payload("a")
    assert log.take(step(1, src=1), 2, 0) != Payload("a")  # rank 2 has not done step 0
    assert log.session_fault


def test_a_failure_keeps_its_place_in_the_session(log):
    log.fail(step(0), "no room", 0)
    log.publish(step(1), "b", 0)
    for rank in (1, 2):
        assert "no room" in reason_of(log.take(step(0), rank, 0))
        assert log.take(step(1), rank, 0) == Payload("b")
    assert log.session_fault == ""


def test_the_last_step_may_be_asked_for_again(log):
    log.publish(step(0), "a", 0)
    assert log.take(step(0), 1, 0) == log.take(step(0), 1, 0) == Payload("a")
    assert log.session_fault == ""


@pytest.mark.parametrize(
    ("break_it", "fault"),
    [
        (lambda log: log.take(step(2), 1, 0), "rank 1 is at step 2 where step 1 was due"),
        (lambda log: log.fail(step(3), "x", 0), "rank 0 is at step 3 where step 2 was due"),
        (lambda log: log.fail(step(0), "x", 0), "rank 0 is at step 0 where step 2 was due"),
        (lambda log: log.take(step(1, src=2), 1, 0), "disagree whether 0 or 2"),
        (lambda log: log.break_session(0, "rank 1 gave up"), "rank 1 gave up"),
        (lambda log: log.expire(TTL), r"step 0 was not taken by ranks \{2\} within 10 s"),
        (lambda log: (log.source_lost(0, 0), log.source_back(0)), "rank 0 restarted"),
        (lambda log: (log.receiver_lost(2), log.receiver_back(2)), "rank 2 restarted"),
    ],
)
def test_a_session_breaks_for_all_until_a_new_one(log, break_it, fault):
    log.publish(step(0), "a", 0)
    log.take(step(0), 1, 0)
    unread = published_thing(log, step(1))
    break_it(log)
    assert re.search(fault, log.session_fault)
    assert is_dropped(unread)
    assert log.session_fault in reason_of(log.take(step(0), 2, TTL))
    assert log.session_fault in reason_of(log.take(step(1), 1, TTL))
    with pytest.raises(BroadcastAborted, match="broken"):
        log.publish(step(2), "c", TTL)

    assert log.new_session() == log.session == 1
    assert log.session_fault == ""
    assert "session 0 is over" in reason_of(log.take(step(1), 1, TTL))
    log.break_session(0, "an old complaint")
    log.publish(step(0, session=1), "d", TTL)
    assert log.take(step(0, session=1), 1, TTL) == log.take(step(0, session=1), 2, TTL) == Payload("d")


def test_named_broadcasts_do_not_care_about_sessions(log):
    log.publish(named(), "plan", 0)
    log.break_session(0, "rank 1 gave up")
    assert log.take(named(), 1, 0) == Payload("plan")


def test_a_rank_lost_before_the_first_step_does_not_break_the_session(log):
    log.source_lost(1, 0)
    log.receiver_lost(1)
    log.source_back(1)
    log.receiver_back(1)
    assert log.session_fault == ""


class LogAgainstModel(RuleBasedStateMachine):
    """Named tags under random events: what a receiver sees never changes once it is final, and is the source's."""

    ranks = st.integers(0, 2)
    names = st.sampled_from("abcd")

    @initialize()
    def begin(self):
        self.log = BroadcastLog("e1", 3, ttl_s=1e9)
        self.sent = {}
        self.seen = {}

    def tag(self, name):
        return named(name, src=ord(name) % 3)

    @rule(name=names, value=st.integers())
    def publish(self, name, value):
        if name not in self.sent:
            try:
                self.log.publish(self.tag(name), value, 0)
                self.sent[name] = value
            except BroadcastAborted:
                pass

    @rule(name=names)
    def fail(self, name):
        self.log.fail(self.tag(name), "x", 0)

    @rule(name=names, rank=ranks)
    def take(self, name, rank):
        tag = self.tag(name)
        if rank == tag.src:
            return
        result = self.log.take(tag, rank, 0)
        if isinstance(result, Payload):
            assert result.value == self.sent[name]
        if name in self.sent:
            assert result != Pending()
        if isinstance(result, Aborted) and name not in self.sent:
            self.seen[name] = "aborted"
        if isinstance(result, Payload):
            assert self.seen.get(name) != "aborted"

    @rule(rank=ranks, event=st.sampled_from(["receiver_lost", "receiver_back", "source_back"]))
    def membership(self, rank, event):
        getattr(self.log, event)(rank)

    @rule(rank=ranks)
    def lose_source(self, rank):
        self.log.source_lost(rank, 0)

    @invariant()
    def consistent(self):
        if hasattr(self, "log"):
            self.log.check_integrity()


TestLogAgainstModel = LogAgainstModel.TestCase
TestLogAgainstModel.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
