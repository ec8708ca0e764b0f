"""A whole world of ranks in one process, without an engine, a GPU or Ray: to try, test and debug the cache.

`starter.py` is the thing itself; the rest turns a command line into one: `command_line.py` reads it, `settings.py`
says what it means, `sizes.py` what it costs, and `__main__.py` runs it as a process. Users import from `__main__`,
as they do in LMCache.
"""
