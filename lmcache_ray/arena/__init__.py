"""Arenas: the shared-memory files that hold the chunks of one rank and outlive its process.

`arena.Arena` is the owner's side, `mapped.ArenaMap` everybody else's, and `slots.ArenaSlots` the protocol that both
follow. Nothing is imported here, so that each module loads only what it needs.
"""
