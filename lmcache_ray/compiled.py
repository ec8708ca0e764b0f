"""Finds the parts of this package that are compiled from C. All of them have a twin in Python that gives the same.

They are built with the package where there is a C compiler. Where there is none, everything works, more slowly.
"""

import logging
import sys
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

logger = logging.getLogger(__name__)


@cache
def compiled_module(name: str, *, form: int) -> ModuleType | None:
    """The compiled module `name` (dotted) if there is one whose `FORMAT` is `form`; else None, and the log says why.

    Looked for beside its sources, then in the installations on the path: a source tree that was copied to another
    place, as Ray copies a job's working directory, comes without its compiled parts.
    """
    package = Path(__file__).parent
    folder = Path(*name.split(".")[1:-1])
    folders = [package / folder, *(Path(entry, package.name, folder) for entry in sys.path)]
    spec = PathFinder.find_spec(name, [str(each) for each in folders])
    if spec is None or spec.loader is None:
        logger.warning(
            "%s was not built, so its work is done in Python, which is slower: install a C compiler with Python's "
            "headers, and the package again",
            name,
        )
        return None
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:  # built against libraries that are not here
        logger.warning("%s cannot be loaded and is not used: install the package again (%s)", name, error)
        return None
    if getattr(module, "FORMAT", None) != form:
        logger.warning("%s was built from another version and is not used: install the package again", spec.origin)
        return None
    return module
