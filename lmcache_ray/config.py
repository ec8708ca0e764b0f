"""The engine's configuration: defaults < file < environment < command line, each value with its origin.

Every constructor and every mutator, assignment included, checks each value first and then takes all of them or none.
What values mean together is no single source's business: `validate` judges it after the last one. Only `build.py` reads
a whole configuration; everything behind it takes plain arguments.

::

    config = load_config("engine.yaml")                      # file, then LMCACHE_* on top
    config.update(parse_overrides(argv), COMMAND_LINE)       # then the command line
    config.validate()                                        # do the values go together?
    print(config.describe())                                 # chunk_size = 128   (command line --chunk-size)
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import TypeAdapter, ValidationError
from typing_extensions import Self

from lmcache_ray.config_compat import ABSENT_KEYS, refusal_of
from lmcache_ray.config_fields import ALIASES, SPELLINGS, ConfigValues
from lmcache_ray.config_sources import (
    ARGUMENT,
    COMMAND_LINE,
    DEFAULT,
    ENVIRONMENT,
    KNOWN_KEYS,
    Source,
    SourceKind,
    parse_overrides,
    read_environment,
    read_file,
)
from lmcache_ray.config_spelling import is_null, text_of
from lmcache_ray.errors import ConfigError
from lmcache_ray.tiers.spec import Contradiction, masked, tier_contradictions

__all__ = [
    "ARGUMENT",
    "COMMAND_LINE",
    "ConfigEntry",
    "LMCacheEngineConfig",
    "Source",
    "SourceKind",
    "load_config",
    "override_config_from_dict",
    "parse_overrides",
]

Scalar = bool | int | float | str | None

_CHECKER: Final = TypeAdapter(ConfigValues)


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """One line of the effective configuration. `value` is text with secrets masked."""

    key: str
    value: str
    origin: str


class LMCacheEngineConfig(ConfigValues):
    """The configuration of one engine; its keys are the attributes of `ConfigValues`.

    Values may be given as Python objects or as the text a file would hold. None and "null" unset a key: it takes its
    default. A key that LMCache has for a feature that is absent here is accepted at LMCache's default and is no
    attribute. Each value is right by itself at any time; values may contradict each other until `validate`. Equal when
    all values are equal, wherever they came from; picklable.
    """

    _origins: dict[str, str]

    def __init__(self, **values: object) -> None:
        """Defaults with `values` on top. Raises `ConfigError` that lists everything wrong with them."""
        self._commit(ConfigValues(), {key: DEFAULT.origin_of(key) for key in SPELLINGS})
        self.update(values)

    @classmethod
    def from_defaults(cls, **values: object) -> Self:
        """Defaults with keyword `values` on top."""
        return cls(**values)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Defaults with `values` on top."""
        config = cls()
        config.update(values)
        return config

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Defaults with a YAML file on top; the environment is not read."""
        config = cls()
        config.update(read_file(path), Source(SourceKind.FILE, os.fspath(path)))
        return config

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Defaults with the `LMCACHE_<KEY>` variables of `environ` (default: the process's) on top."""
        return cls().update_config_from_env(environ)

    def update_config_from_env(self, environ: Mapping[str, str] | None = None) -> Self:
        """Puts the `LMCACHE_<KEY>` variables of `environ` (default: the process's) on top and returns itself."""
        self.update(read_environment(environ).values, ENVIRONMENT)
        return self

    def update(self, values: Mapping[str, object], source: Source = ARGUMENT) -> None:
        """Puts `values` on top: all of them, or none when any is wrong.

        Raises `ConfigError` with one line for each wrong key or value: the key, the value, its origin and what is
        accepted. Whether the values go together is not asked: another source may say the rest.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"a configuration is a mapping of keys to values; got {type(values).__name__}")
        settings, problems = _resolve(values, source)
        checked, failures = _check({key: setting.value for key, setting in settings.items()})
        problems += [settings[key].problem(reason) for key, reason in failures.items()]
        if problems or checked is None:
            raise ConfigError("\n".join(problems))
        self._commit(checked, {key: setting.origin for key, setting in settings.items()})

    def validate(self) -> Self:
        """Checks that the values go together, and returns itself. For the reader of the last source.

        Raises `ConfigError` with one line for each contradiction: the keys, their values and origins, and what is
        accepted.
        """
        contradictions = tier_contradictions(
            local_cpu=self.local_cpu,
            local_disk=self.local_disk,
            max_local_disk_size=self.max_local_disk_size,
            remote_url=self.remote_url,
        )
        if contradictions:
            raise ConfigError("\n".join(map(self._with_origins, contradictions)))
        return self

    def to_dict(self) -> dict[str, Scalar]:
        """Every key with its value, JSON-ready, nothing masked; `from_dict` takes it back."""
        return {key: getattr(self, key) for key in SPELLINGS}

    def copy(self) -> Self:
        """An independent configuration with the same values and origins."""
        twin = object.__new__(type(self))
        twin._commit(self, self._origins)
        return twin

    def origin_of(self, key: str) -> str:
        """Where the value of `key` was decided: `default`, `file PATH`, `environment VARIABLE` …"""
        return self._origins[ALIASES.get(key, key)]

    def entries(self) -> list[ConfigEntry]:
        """The effective configuration with origins, secrets masked."""
        return [ConfigEntry(key, _shown(value), self._origins[key]) for key, value in self.to_dict().items()]

    def describe(self) -> str:
        """The effective configuration as text, one line a key: `key = value   (origin)`."""
        lines = [(f"{entry.key} = {entry.value}", entry.origin) for entry in self.entries()]
        width = max(len(left) for left, _ in lines)
        return "\n".join(f"{left:<{width}}   ({origin})" for left, origin in lines)

    def __repr__(self) -> str:
        values = ", ".join(f"{key}={masked(repr(value))}" for key, value in self.to_dict().items())
        return f"{type(self).__name__}({values})"

    def __setattr__(self, name: str, value: object) -> None:
        """Assignment is `update` of one key."""
        self.update({name: value})

    def _with_origins(self, contradiction: Contradiction) -> str:
        origins = ", ".join(f"{key}: {self._origins[key]}" for key in contradiction.keys)
        return f"{contradiction.text} ({origins})"

    def _commit(self, values: ConfigValues, origins: Mapping[str, str]) -> None:
        """Takes over the values of the keys in `origins`."""
        known: dict[str, str] = getattr(self, "_origins", {})
        self.__dict__.update({key: getattr(values, key) for key in origins}, _origins=known | dict(origins))


@dataclass(frozen=True, slots=True)
class _Setting:
    """One value that a source gives to a key; `given` is the key's name as the source spelled it."""

    given: str
    value: object
    origin: str

    def problem(self, reason: str) -> str:
        return f"{self.given} = {_shown(self.value)} ({self.origin}) {reason}"


def _resolve(values: Mapping[str, object], source: Source) -> tuple[dict[str, _Setting], list[str]]:
    """The settings of this project's keys in `values`, and what is wrong with the other keys."""
    settings: dict[str, _Setting] = {}
    problems: list[str] = []
    for given, value in values.items():
        setting = _Setting(given, value, source.origin_of(str(given)))
        key = ALIASES.get(given, given)
        if given not in KNOWN_KEYS:
            problems.append(source.unknown(str(given)))
        elif given in ABSENT_KEYS:
            refusal = refusal_of(given, value)
            problems += [setting.problem(refusal)] if refusal else []
        elif key in settings and not _same(key, settings[key].value, value):
            other = settings[key]
            problems.append(setting.problem(f"contradicts {other.given} = {_shown(other.value)}: one value, two names"))
        else:
            settings[key] = setting
    return settings, problems


def _same(key: str, one: object, other: object) -> bool:
    """Whether two values of `key` mean the same. Values that mean nothing only equal themselves."""
    if is_null(one) or is_null(other):
        return is_null(one) and is_null(other)
    try:
        return SPELLINGS[key](one) == SPELLINGS[key](other)
    except ValueError:
        return text_of(one) == text_of(other)


def _check(values: Mapping[str, object]) -> tuple[ConfigValues | None, dict[str, str]]:
    """`values`, with defaults for what they unset or lack, when all are valid; else the reason for each that is not."""
    try:
        return _CHECKER.validate_python({key: value for key, value in values.items() if not is_null(value)}), {}
    except ValidationError as error:
        return None, {str(item["loc"][0]): str(item["ctx"]["error"]) for item in error.errors()}


def _shown(value: object) -> str:
    """`value` for messages and listings: short, with secrets masked."""
    if isinstance(value, dict | list | tuple | set):
        return f"a {type(value).__name__} of {len(value)}"
    text = masked("null" if value is None else str(value).lower() if isinstance(value, bool) else str(value))
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return repr(text) if isinstance(value, str) else text


def load_config(
    config_file: str | os.PathLike[str] | None = None, *, environ: Mapping[str, str] | None = None
) -> LMCacheEngineConfig:
    """Defaults < file < environment. The file is `config_file`, else the one `LMCACHE_CONFIG_FILE` names, else none.

    A command line may still be put on top, so the values need not go together yet: `validate` says whether they do.
    """
    environment = read_environment(environ)
    path = config_file or environment.config_file
    config = LMCacheEngineConfig.from_file(path) if path else LMCacheEngineConfig()
    config.update(environment.values, ENVIRONMENT)
    return config


def override_config_from_dict(
    config: LMCacheEngineConfig, overrides: Mapping[str, object], source: Source = ARGUMENT
) -> None:
    """Puts `overrides` on top of `config`, in place: all of them or, with `ConfigError`, none."""
    config.update(overrides, source)
