"""The index: one pure object that decides, for all ranks of a world, where chunks live and which are evicted.

Nothing here does IO, waits, or reads a clock; time is an argument. The way in: `plans` (what is decided), `slot_table`
(where chunks are), `write_ledger` (who still owes an answer), `leases` (who reads), `policy` and its implementations
`lru`, `lfu`, `fifo` (what goes first), and `cache_index`, the one door to all of them. `window` plans many requests in
one go.
"""
