"""The order that each eviction policy promises, against a plain model of it."""

import random

from lmcache_ray.index.fifo import FIFOPolicy
from lmcache_ray.index.lfu import LFUPolicy
from lmcache_ray.index.lru import LRUPolicy


def test_lru_orders_by_last_use() -> None:
    policy = LRUPolicy()
    policy.admit([1, 2, 3, 4])
    policy.touch([2, 1])
    assert list(policy.candidates()) == [3, 4, 2, 1]


def test_fifo_ignores_use() -> None:
    policy = FIFOPolicy()
    policy.admit([1, 2, 3])
    policy.touch([1, 1, 2])
    assert list(policy.candidates()) == [1, 2, 3]


def test_lfu_orders_by_number_of_uses_then_by_last_use() -> None:
    policy = LFUPolicy()
    policy.admit([1, 2, 3, 4])
    policy.touch([1, 1, 2, 4])
    assert list(policy.candidates()) == [3, 2, 4, 1]
    policy.touch([2])
    assert list(policy.candidates()) == [3, 4, 1, 2]


def test_lfu_agrees_with_a_model_that_sorts() -> None:
    rng = random.Random(7)
    policy, uses, last_use = LFUPolicy(), dict[int, int](), dict[int, int]()
    for step in range(3000):
        slot = rng.randrange(12)
        if slot not in uses:
            policy.admit([slot])
            uses[slot] = 1
        elif rng.random() < 0.2:
            policy.remove([slot])
            del uses[slot]
            continue
        else:
            policy.touch([slot])
            uses[slot] += 1
        last_use[slot] = step
        assert list(policy.candidates()) == sorted(uses, key=lambda slot: (uses[slot], last_use[slot]))
