"""Where configuration comes from: YAML files, the environment, the command line. Text in, text out, nothing judged.

Each reader returns key -> text (a file may also hold containers, which no key takes); what the text means is
`config_spelling.py`'s business, and `Source` says in messages where a value came from. The environment is read in
one function, `read_environment`.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Final

import yaml

from lmcache_ray.config_compat import ABSENT_KEYS, is_absent_flag
from lmcache_ray.config_fields import ALIASES, SPELLINGS
from lmcache_ray.config_spelling import Truth
from lmcache_ray.errors import ConfigError

KNOWN_KEYS: Final = (*SPELLINGS, *ALIASES, *sorted(ABSENT_KEYS))
"""Every key that is understood, this project's first."""

ENV_PREFIX: Final = "LMCACHE_"
CONFIG_FILE_VARIABLE: Final = "LMCACHE_CONFIG_FILE"
_NOT_KEYS: Final = frozenset({CONFIG_FILE_VARIABLE, "LMCACHE_LOG_LEVEL", "LMCACHE_TRACK_USAGE"})


class SourceKind(Enum):
    """The places that can decide a value, lowest precedence first."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    COMMAND_LINE = "command line"
    ARGUMENT = "argument"
    """The calling program: constructor, mutator or assignment."""


@dataclass(frozen=True, slots=True)
class Source:
    """The place a set of values came from. `path` is set for files only."""

    kind: SourceKind
    path: str = ""

    def spell(self, key: str) -> str:
        """`key` as it is written there: `LMCACHE_CHUNK_SIZE`, `--chunk-size`, `chunk_size`."""
        if self.kind is SourceKind.ENVIRONMENT:
            return key if key.startswith(ENV_PREFIX) else ENV_PREFIX + key.upper()
        if self.kind is SourceKind.COMMAND_LINE:
            return "--" + key.replace("_", "-")
        return key

    def origin_of(self, key: str) -> str:
        """Where `key` was set: `file PATH`, `environment VARIABLE`, `command line --flag`, `argument`, `default`."""
        if self.kind is SourceKind.FILE:
            return f"file {self.path}"
        if self.kind in (SourceKind.ENVIRONMENT, SourceKind.COMMAND_LINE):
            return f"{self.kind.value} {self.spell(key)}"
        return str(self.kind.value)

    def unknown(self, key: str, also_known: Collection[str] = ()) -> str:
        """The message for a key that is not known, with the nearest one that is."""
        known = {name.lower(): self.spell(name) for name in (*KNOWN_KEYS, *also_known)}
        bare = key.removeprefix(ENV_PREFIX) if self.kind is SourceKind.ENVIRONMENT else key
        nearest = known[get_close_matches(bare.lower(), known, n=1, cutoff=0.0)[0]]
        return f"{self.spell(key)} ({self.origin_of(key)}) is not a configuration key; the nearest is {nearest}"


DEFAULT: Final = Source(SourceKind.DEFAULT)
ENVIRONMENT: Final = Source(SourceKind.ENVIRONMENT)
COMMAND_LINE: Final = Source(SourceKind.COMMAND_LINE)
ARGUMENT: Final = Source(SourceKind.ARGUMENT)


@dataclass(frozen=True, slots=True)
class Environment:
    """What the process environment says."""

    values: dict[str, str]
    """Key -> text of every `LMCACHE_<KEY>`. A variable that is not all upper case stands under its whole name."""
    config_file: str | None
    """`LMCACHE_CONFIG_FILE`, if set and not empty."""


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """The `LMCACHE_*` variables of `environ` (default: the process's own)."""
    environ = os.environ if environ is None else environ
    values = {
        name.removeprefix(ENV_PREFIX).lower() if name.isupper() else name: text
        for name, text in environ.items()
        if name.startswith(ENV_PREFIX) and name not in _NOT_KEYS
    }
    return Environment(values, environ.get(CONFIG_FILE_VARIABLE) or None)


def read_file(path: str | os.PathLike[str]) -> dict[str, object]:
    """The mapping in a YAML file, scalars as text. A file without content is an empty mapping.

    Raises `ConfigError`, which names the file, when it cannot be read, is not YAML, repeats a key, or holds no mapping.
    """
    try:
        content: object = yaml.load(Path(path).read_text("utf-8-sig"), Loader=_TextLoader)
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"configuration file {path} is not valid YAML: {error}") from error
    if content is None or content == "":  # the base loader's null
        return {}
    if not isinstance(content, dict):
        kind = "a list" if isinstance(content, list) else "a single value"
        raise ConfigError(f"configuration file {path} must hold a mapping of keys to values; it holds {kind}")
    return content


def parse_overrides(argv: Sequence[str], *, also_known: Collection[str] = ()) -> dict[str, str]:
    """Key -> text of `--<config-key> VALUE` and `--<config-key>=VALUE`; `-` and `_` in keys are the same.

    A boolean key may stand alone, which means true (`--save-unfull-chunk`). A value that itself begins with `--` needs
    the form with `=`. `also_known` are the caller's own flags, for the suggestion only. Raises `ConfigError` for an
    unknown flag, a key given twice, a missing value and for anything that is not a flag.
    """
    overrides: dict[str, str] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, text = word.partition("=")
        if not flag.startswith("--") or flag == "--":
            raise ConfigError(f"unexpected argument {word!r}; configuration is given as --<key> VALUE")
        key = flag[2:].replace("-", "_")
        if key not in KNOWN_KEYS:
            raise ConfigError(COMMAND_LINE.unknown(key, also_known))
        if key in overrides:
            raise ConfigError(f"{flag} is given twice")
        if not equals and words and not words[0].startswith("--"):
            text = words.pop(0)
        elif not equals:
            text = _text_of_bare(key, flag)
        overrides[key] = text
    return overrides


def _text_of_bare(key: str, flag: str) -> str:
    is_flag = is_absent_flag(key) if key in ABSENT_KEYS else isinstance(SPELLINGS[ALIASES.get(key, key)], Truth)
    if not is_flag:
        raise ConfigError(f"{flag} needs a value")
    return "true"


class _TextLoader(yaml.BaseLoader):
    """YAML's base loader leaves scalars as text; this one also refuses a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for name in set(names):
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {name!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)
