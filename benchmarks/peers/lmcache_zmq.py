"""LMCache's lookup of a cached prompt over several ranks: its ZMQ client here, its server in a process for each rank.

Answers the round "lookup" (`answers.py`). By hand:

    yes lookup | head -20 | /path/to/peer/python benchmarks/peers/lmcache_zmq.py --world-size 4
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

import torch

from benchmarks.measure import Samples, interleaved
from benchmarks.peers.answers import answer_rounds
from benchmarks.peers.lmcache_parts import LookupService, build_engine, close_engine
from benchmarks.workload import KVShape, tokens

_SHAPE = KVShape(num_layers=2, num_heads=1, head_size=64)  # a lookup moves no bytes
_SPARE_NBYTES = 64 * 2**20
_READY_TIMEOUT_S = 120.0


def main() -> None:
    arguments = _parse_arguments()
    name = f"lookup-{os.getpid()}"
    with _servers(name, arguments.world_size, arguments.lookup_tokens):
        service = LookupService(name, _SHAPE, world_size=arguments.world_size)
        prompt = tokens(arguments.lookup_tokens, seed=1)
        forms: dict[str, list[int] | torch.Tensor] = {"lookup_list": prompt, "lookup_tensor": torch.tensor(prompt)}

        def look_up(form: str) -> None:
            found = service.lookup(forms[form])
            if found != len(prompt):
                raise RuntimeError(f"{form} found {found} of {len(prompt)} cached tokens")

        def round_of_lookups() -> Mapping[str, Samples]:
            return interleaved({form: partial(look_up, form) for form in forms}, rounds=1, warmup=0)

        answer_rounds(
            {"lmcache": metadata.version("lmcache"), "world_size": arguments.world_size}, {"lookup": round_of_lookups}
        )
        service.close()


@contextmanager
def _servers(name: str, world_size: int, lookup_tokens: int) -> Iterator[None]:
    """A process with an engine and its lookup server for each rank; all have the prompt when this has begun."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    for rank in range(world_size):
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, name, world_size, rank, lookup_tokens), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(_READY_TIMEOUT_S):
                raise TimeoutError(f"the server of rank {rank} was not ready after {_READY_TIMEOUT_S} s")
            pipe.recv()
        yield
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(_READY_TIMEOUT_S)


def _serve(parent: Connection, name: str, world_size: int, rank: int, lookup_tokens: int) -> None:
    """One rank: hold the prompt, answer lookups until the parent closes its end of the pipe."""
    engine_name = f"{name}-{rank}"
    pool_nbytes = lookup_tokens * _SHAPE.token_nbytes + _SPARE_NBYTES
    engine = build_engine(
        engine_name, _SHAPE, pool_nbytes=pool_nbytes, moves_bytes=False, world_size=world_size, worker_id=rank
    )
    engine.store(tokens(lookup_tokens, seed=1), slot_mapping=torch.arange(lookup_tokens))
    server = LookupService.serve(engine, name, _SHAPE, world_size=world_size, worker_id=rank)
    parent.send("ready")
    try:
        parent.recv()
    except EOFError:
        pass
    server.close()
    close_engine(engine_name)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="LMCache's lookup client over several ranks, as a benchmark asks for it."
    )
    parser.add_argument("--world-size", type=int, default=4, metavar="N", help="ranks, a process each (4)")
    parser.add_argument("--lookup-tokens", type=int, default=32768, metavar="N", help="looked up (32768)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
