"""How long a lookup of a long cached prompt takes over a call that does nothing, for every form a prompt comes in."""

from array import array
from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np
import torch

from benchmarks.claims import Claim, Part, Promise, at_least, at_most, beside, samples_json
from benchmarks.cluster_parts.worlds import expect, no_op, per_rank_world, running
from benchmarks.measure import Case, Json, Samples, interleaved, progress, ratio
from benchmarks.peers.child import PeerProcess
from benchmarks.workload import CHUNK_SIZE, KVShape, tokens
from cluster.client import CacheCluster
from lmcache_ray.tokens import TokenSequence

SMALL = KVShape(num_layers=2, num_heads=1, head_size=64)
"""KV of which a chunk takes 128 KiB a rank: a lookup moves none of it."""

_BARS_MS = {"keys": 0.3, "array": 1.0, "numpy": 1.0, "tensor": 1.0, "list": 2.0}
_FLAT = at_most(
    "cluster lookup by keys, 4 ranks over 1", 0.3, note="excess over a no-op call, on 4 ranks less that on 1 rank"
)
_PEER_RANKS = (1, 4)
_PEER_FORMS = ("list", "tensor")
_PEER_WARMUP = 3
_PEER_SCRIPT = "lmcache_zmq.py"


def measure_lookups(*, num_tokens: int, world_sizes: tuple[int, ...], rounds: int, peer_python: str | None) -> Part:
    """Excess over a no-op call for worlds of several sizes; beside them LMCache's lookup client, if there is one."""
    claims: list[Claim] = []
    measured: dict[str, Json] = {"num_tokens": num_tokens, "num_chunks": num_tokens // CHUNK_SIZE}
    of_worlds: dict[int, dict[str, Samples]] = {}
    for world_size in world_sizes:
        progress(f"lookups: {_ranks(world_size)}")
        with ExitStack() as stack:
            world = per_rank_world(world_size, SMALL, kv_tokens=num_tokens, capacity_tokens=num_tokens)
            cluster = stack.enter_context(running(world))
            cases = _cases(cluster, num_tokens)
            if peer_python is not None and world_size in _PEER_RANKS:
                arguments = ["--world-size", str(world_size), "--lookup-tokens", str(num_tokens)]
                peer = stack.enter_context(PeerProcess(peer_python, _PEER_SCRIPT, arguments))
                of_peer, measured[f"lmcache_{world_size}_ranks"] = _beside_peer(cases, peer, world_size, rounds // 2)
                claims += of_peer
            samples = interleaved(cases, rounds=rounds, warmup=max(2, rounds // 10))
        of_worlds[world_size] = samples
        measured[f"{world_size}_ranks"] = samples_json(samples)
    return Part([*_claims(of_worlds), *claims], measured)


def _cases(cluster: CacheCluster, num_tokens: int) -> dict[str, Case]:
    """A no-op, and the lookup of one cached prompt in every form."""
    prompt = tokens(num_tokens, seed=1)
    expect(cluster.store(prompt, np.arange(num_tokens)), num_tokens, "stored")
    keys = cluster.link.hasher.keys(prompt)
    lengths = [CHUNK_SIZE] * len(keys)
    forms: dict[str, TokenSequence] = {
        "array": array("I", prompt),
        "numpy": np.array(prompt),
        "tensor": torch.tensor(prompt),
        "list": prompt,
    }

    def by_keys() -> None:
        expect(cluster.lookup(hashes=keys, offsets=lengths), num_tokens, "looked up by keys")

    def by_tokens(name: str) -> Case:
        return lambda: expect(cluster.lookup(forms[name]), num_tokens, f"looked up by {name}")

    return {"no_op": no_op(cluster), "keys": by_keys} | {name: by_tokens(name) for name in forms}


def _beside_peer(
    cases: Mapping[str, Case], peer: PeerProcess, world_size: int, rounds: int
) -> tuple[list[Claim], dict[str, Json]]:
    """LMCache's lookups of as long a prompt, round by round in turn with ours."""
    rounds_of_both: list[dict[str, Samples]] = []
    for number in range(-_PEER_WARMUP, rounds):
        ours = interleaved({name: cases[name] for name in ("no_op", *_PEER_FORMS)}, rounds=1, warmup=0)
        theirs = peer.round("lookup")
        if number >= 0:
            rounds_of_both.append(ours | {f"lmcache_{form}": theirs[f"lookup_{form}"] for form in _PEER_FORMS})
    samples = {name: Samples.joined(of_round[name] for of_round in rounds_of_both) for name in rounds_of_both[0]}
    ratios = {form: ratio(samples[f"lmcache_{form}"], samples[form]) for form in _PEER_FORMS}
    claims = []
    for form, found in ratios.items():
        name, note = f"LMCache's ZMQ lookup over ours, {_ranks(world_size)}", f"time, of a prompt as a {form}"
        has_bar = (form, world_size) == ("list", 4)
        promise = at_least(name, 4.0, note=note) if has_bar else beside(name, "x", note)
        claims.append(promise.of_ratio(found))
    limit = beside(
        f"LMCache's ZMQ lookup over an actor call that does nothing, {_ranks(world_size)}",
        "x",
        "time, of a prompt as a list: no lookup that is an actor call can be further ahead",
    )
    claims.append(limit.of_ratio(ratio(samples["lmcache_list"], samples["no_op"])))
    measured = samples_json(samples) | {"ratios": {form: found.to_json() for form, found in ratios.items()}}
    return claims, {"facts": peer.facts, **measured}


def _claims(of_worlds: Mapping[int, Mapping[str, Samples]]) -> list[Claim]:
    claims = [
        _promise(form, bar, world_size).of_excess(samples[form], samples["no_op"])
        for form, bar in _BARS_MS.items()
        for world_size, samples in of_worlds.items()
    ]
    if {1, 4} <= of_worlds.keys():
        one, four = (
            _promise("keys", 0.3, size).of_excess(of_worlds[size]["keys"], of_worlds[size]["no_op"]) for size in (1, 4)
        )
        claims.append(_FLAT.claim(four.value - one.value, four.low - one.high, four.high - one.low))
    return claims


def _promise(form: str, bar: float, world_size: int) -> Promise:
    return at_most(f"cluster lookup by {form}, {_ranks(world_size)}", bar, note="over a no-op call")


def _ranks(world_size: int) -> str:
    return "1 rank" if world_size == 1 else f"{world_size} ranks"
