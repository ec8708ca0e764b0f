"""What reaches all ranks at once: the chunks of a first-rank (MLA) world, and small objects through the coordinator.

    python benchmarks/broadcast.py            # about 1 minute, 1.5 GiB of memory
    python benchmarks/broadcast.py --quick

In a first-rank world rank 0 holds the only copy, and the ranks of its node read it there, each once. So the measure is
a message to each of as many ranks in which it makes one plain copy of as many bytes. Prints one JSON document.
"""

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from benchmarks.claims import Claim, Part, at_most, beside, results_of, samples_json
from benchmarks.cluster_parts.worlds import (
    World,
    check_rows_of_first,
    copy_facts,
    expect,
    fan_out_copy,
    local_ray,
    no_op,
    no_op_in_ranks,
    retrieve_in_ranks,
    running,
    timed_in_ranks,
)
from benchmarks.measure import Case, Json, Samples, begin_run, emit, interleaved, progress, ratio
from benchmarks.memory_copy import LIBC_COPY, TORCH_COPY
from benchmarks.workload import BLOCK_SIZE, CHUNK_SIZE, Prompt
from cluster.client import CacheCluster
from lmcache_ray.first_rank import SharedLoad
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.keys import KEY_NBYTES
from lmcache_ray.shape_spec import parse_kvcache_shape_spec

_MIB = 2**20
_NUM_LAYERS, _HIDDEN = 32, 512
_TOKEN_NBYTES = _NUM_LAYERS * _HIDDEN * 2  # bf16, one latent vector a layer
_ORDERS = ("random", "contiguous")
_COPIES = {TORCH_COPY: "torch copy_", LIBC_COPY: "memmove"}
_TENSOR_LEAD_S = 0.1  # a rank makes its tensor first


@dataclass(frozen=True, slots=True)
class Scale:
    """Ranks, bytes, and rounds of the cases that move chunks, that send an object, and that send a tensor."""

    world_size: int
    nbytes: int
    rounds: int
    object_rounds: int
    tensor_rounds: int


def main() -> None:
    arguments = _parse_arguments()
    scale = Scale(4, 64 * _MIB, 3, 10, 1) if arguments.quick else Scale(4, 64 * _MIB, 21, 100, 3)
    run = begin_run("broadcast", vars(arguments))
    with local_ray(), running(_world(scale)) as cluster:
        parts = {
            "chunks": measure_chunks(cluster, scale),
            "objects": measure_objects(cluster, scale),
        }
    emit(run, results_of(parts))


def _world(scale: Scale) -> World:
    num_tokens = scale.nbytes // _TOKEN_NBYTES
    dims = (_NUM_LAYERS, 1, 2 * num_tokens // BLOCK_SIZE, 1, _HIDDEN)
    groups = parse_kvcache_shape_spec(f"({','.join(map(str, dims))}):bfloat16:{_NUM_LAYERS}")
    return World(scale.world_size, groups, num_tokens, use_mla=True)


def measure_chunks(cluster: CacheCluster, scale: Scale) -> Part:
    """Retrieve to all ranks, led by the driver and by each rank's own engine, beside one plain copy in each rank."""
    progress(f"chunks: {scale.nbytes // _MIB} MiB to {scale.world_size} ranks")
    num_tokens = scale.nbytes // _TOKEN_NBYTES
    prompt = Prompt.of(num_tokens)
    sources = prompt.sources["random"].numpy()
    expect(cluster.store(prompt.tokens, sources), num_tokens, "stored")

    def retrieve(rows: np.ndarray) -> None:
        expect(int(cluster.retrieve(prompt.tokens, rows).sum()), num_tokens, "retrieved")

    def retrieve_in_each(rows: np.ndarray) -> None:
        expect(min(retrieve_in_ranks(cluster, prompt.tokens, rows)), num_tokens, "retrieved by the ranks' engines")

    cases: dict[str, Case] = {name: fan_out_copy(cluster, name, scale.nbytes) for name in _COPIES}
    for order in _ORDERS:
        rows = prompt.targets[order].numpy()
        cases[f"retrieve_{order}"] = partial(retrieve, rows)
        cases[f"engine_retrieve_{order}"] = partial(retrieve_in_each, rows)
    samples = interleaved(cases, rounds=scale.rounds, warmup=2)
    for order in _ORDERS:
        rows = prompt.targets[order].numpy()
        retrieve(rows)
        check_rows_of_first(cluster, sources, rows)
    facts: dict[str, Json] = {"nbytes": scale.nbytes, "world_size": scale.world_size, **copy_facts(cluster)}
    return Part(_chunk_claims(samples, scale), facts | samples_json(samples) | {"ratios": _ratios(samples)})


def _chunk_claims(samples: dict[str, Samples], scale: Scale) -> list[Claim]:
    size = f"{scale.nbytes // _MIB} MiB to {scale.world_size} ranks"
    claims = []
    for order in _ORDERS:
        for copy, shown in _COPIES.items():
            note = f"time, of {scale.world_size} local {shown} through the same fan-out"
            name = f"MLA retrieve, {order} blocks, {size}"
            promise = at_most(name, 1.15, "x", note) if copy == TORCH_COPY else beside(name, "x", note)
            claims.append(promise.of_ratio(ratio(samples[f"retrieve_{order}"], samples[copy])))
    name, note = f"MLA retrieve by the ranks' engines, random blocks, {size}", "time, of local torch copy_ likewise"
    claims.append(beside(name, "x", note).of_ratio(ratio(samples["engine_retrieve_random"], samples[TORCH_COPY])))
    return claims


def _ratios(samples: dict[str, Samples]) -> dict[str, Json]:
    return {
        f"{name}_over_{copy}": ratio(case, samples[copy]).to_json()
        for name, case in samples.items()
        if name not in _COPIES
        for copy in _COPIES
    }


def measure_objects(cluster: CacheCluster, scale: Scale) -> Part:
    """The coordinator's broadcasts: of a load plan, which is what they are for, and of a large tensor, which is not."""
    progress("objects through the coordinator")
    plan = _plan(scale.nbytes // _TOKEN_NBYTES // CHUNK_SIZE, scale.world_size)
    cases: dict[str, Case] = {
        "no_op": no_op(cluster),
        "no_op_in_ranks": no_op_in_ranks(cluster),
        "plan": timed_in_ranks(cluster, "broadcast_object", plan),
    }
    samples = interleaved(cases, rounds=scale.object_rounds, warmup=3)
    tensor = timed_in_ranks(cluster, "broadcast_tensor", scale.nbytes, lead_s=_TENSOR_LEAD_S)
    samples |= interleaved({"tensor": tensor}, rounds=scale.tensor_rounds)
    ranks = f"{scale.world_size} ranks"
    return Part(
        [
            beside(f"broadcast of a load plan to {ranks}", note="until the last rank has it").of_milliseconds(
                samples["plan"]
            ),
            beside(
                f"broadcast of a {scale.nbytes // _MIB} MiB tensor to {ranks} through the coordinator",
                note="no chunk goes this way",
            ).of_milliseconds(samples["tensor"]),
        ],
        {"plan_chunks": len(plan.refs), **samples_json(samples)},
    )


def _plan(num_chunks: int, world_size: int) -> SharedLoad:
    """As rank 0 sends it."""
    refs = tuple(ChunkRef(number.to_bytes(KEY_NBYTES, "little"), number, number + 1) for number in range(num_chunks))
    return SharedLoad(0, refs, tuple(f"lease-{rank}" for rank in range(world_size)))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What reaches all ranks at once, against plain copies in as many.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a test of the script")
    return parser.parse_args()


if __name__ == "__main__":
    main()
