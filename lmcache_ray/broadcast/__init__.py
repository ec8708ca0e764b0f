"""One rank tells all others: the protocol, the pure log behind it, and its implementations within one process."""
