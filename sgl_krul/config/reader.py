"""The configuration file: read once from YAML, every key checked.

Keys carry their unit (`_bytes`, `_s`); values may be numbers or texts such as `8GiB` and `1h30m`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import reprlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from sgl_krul.config.tree import (
    ChunkConfig,
    Config,
    EstimatorConfig,
    LinkConfig,
    MemoryConfig,
    PauseConfig,
    PlacementConfig,
    QualityConfig,
    RedisConfig,
    RestoreConfig,
    SessionConfig,
    SsdConfig,
    TenantRuleConfig,
    TenantsConfig,
    default_ssd_path,
)
from sgl_krul.errors import ConfigError
from sgl_krul.values import Leaf, home

__all__ = ["load_config", "parse_config", "resolve_config", "to_mapping"]

_S = TypeVar("_S")
_LINKER_FLAG = "--unified-cache-external-linker-config"

# Sections that may be null; True: left out they have their defaults, False: left out they are null.
_OPTIONAL = {"ssd": True, "redis": False, "link": False}

_SECTIONS: dict[str, type[Any]] = {
    "memory": MemoryConfig,
    "ssd": SsdConfig,
    "redis": RedisConfig,
    "placement": PlacementConfig,
    "tenants": TenantsConfig,
    "chunk": ChunkConfig,
    "session": SessionConfig,
    "restore": RestoreConfig,
    "pause": PauseConfig,
    "estimator": EstimatorConfig,
    "quality": QualityConfig,
    "link": LinkConfig,
}
_SECRET = {
    name for name, keys in _SECTIONS.items() if any(key.metadata["leaf"].secret for key in fields(keys))
}
_DOTTED = [f"{name}.{key.name}" for name, section in _SECTIONS.items() for key in fields(section)]


def parse_config(
    mapping: Mapping[str, object], source: str, environ: Mapping[str, str] | None = None
) -> Config:
    """The configuration a mapping describes; what it leaves out has the default.

    `source` names the mapping in messages. `environ` (default: os.environ) fills `~` and $VARIABLES.
    Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    _check_keys(mapping, tuple(_SECTIONS), source, elsewhere=_DOTTED)
    sections: dict[str, Any] = {}
    for name, section in _SECTIONS.items():
        given = mapping.get(name, {} if _OPTIONAL.get(name, True) else None)
        if given is None:
            if name in _OPTIONAL:
                sections[name] = None
                continue
            given = {}  # a section whose keys are all commented out
        if not isinstance(given, Mapping):
            raise _no_section(given, source, name)
        sections[name] = _parse_section(section, given, source, name, environ)
    config = Config(**sections)
    placement = mapping.get("placement")
    chosen = isinstance(placement, Mapping) and "replicate" in placement
    if config.ssd is None and config.redis is not None and not chosen:
        # Who names a Redis and no disk wants sessions to lie there.
        config = replace(config, placement=replace(config.placement, replicate="redis"))
    _check_together(config, source)
    return config


def _no_section(given: object, source: str, name: str) -> ConfigError:
    # `redis: redis://:password@host` is such a mistake.
    shown = "the value" if name in _SECRET else _shown(given)
    off = f", or null to do without {name}" if name in _OPTIONAL else ""
    advice = f" Leave {name} out for the defaults." if _OPTIONAL.get(name, True) else ""
    return ConfigError(
        f"{source}: {name}: {shown} cannot be used: expected a section "
        f"with keys such as {fields(_SECTIONS[name])[0].name}{off}.{advice}"
    )


def _check_together(config: Config, source: str) -> None:
    """What no key can be wrong about alone."""
    wanted = {"both": ("ssd", "redis")}.get(config.placement.replicate, (config.placement.replicate,))
    lacking = [name for name in wanted if getattr(config, name) is None]
    if lacking and (config.placement.replicate != "ssd" or config.redis is not None):
        raise ConfigError(
            f"{source}: placement.replicate: {config.placement.replicate!r} cannot be used without the "
            f"section {lacking[0]}: add it, or choose another of ssd, redis, both."
        )
    if config.link is not None and getattr(config, config.link.tier) is None:
        raise ConfigError(
            f"{source}: link.tier: {config.link.tier!r} cannot be used without the section of that name: add "
            "it, or leave the section link out."
        )
    _check_quality(config, source)
    low, high = config.placement.low_watermark, config.placement.high_watermark
    if low > high:
        raise ConfigError(
            f"{source}: placement.low_watermark: {low:g} cannot be used: expected at most "
            f"placement.high_watermark, which is {high:g}. Correct one, or leave both out for the defaults."
        )


def _check_quality(config: Config, source: str) -> None:
    level = config.quality.level
    if not config.quality.codes:
        return
    if not config.estimator.enabled:
        raise ConfigError(
            f"{source}: quality.level: {level!r} cannot be used without the estimator, which has the queries "
            "that codings are judged by: set estimator.enabled to true, or choose exact."
        )
    if config.restore.strategy == "paper":
        raise ConfigError(
            f"{source}: quality.level: {level!r} cannot be used with restore.strategy paper, which leaves "
            "out layers that others may be coded on: choose another strategy, or exact."
        )
    if config.quality.share > 0.5:
        raise ConfigError(
            f"{source}: quality.share: {config.quality.share:g} cannot be used: expected at most 0.5, one "
            "layer of each pair. Correct it, or leave it out for the default."
        )


def load_config(path: Path, environ: Mapping[str, str] | None = None) -> Config:
    """The configuration in a YAML file; an empty file is the default. Raises ConfigError."""
    source = str(path)
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{source}: the configuration file cannot be read: {error.strerror}. Expected a YAML file: "
            "check the path and its permissions."
        ) from error
    try:
        # _Loader is SafeLoader with one check more: it makes plain values only.
        mapping = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = _yaml_problem(error)
        # Not chained: PyYAML's own message shows the line, and a password may stand there.
        raise ConfigError(f"{source}: not YAML: {problem}. Correct the file at that place.") from None
    if mapping is None:
        mapping = {}
    if not isinstance(mapping, dict):
        raise ConfigError(
            f"{source}: {type(mapping).__name__} where a mapping is expected: sections such as 'memory:' "
            "with their keys indented below. See configs/cpu.yaml for an example."
        )
    return parse_config(mapping, source, environ)


def _yaml_problem(error: Exception) -> str:
    """What is wrong and where, in one line and without the text of the file."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    text = ": ".join(part for part in (error.context, error.problem) if part)
    # A password that begins with * or ! is an alias or a tag to YAML.
    text = re.sub(r"\b(alias|anchor|tag|tag handle) .*", r"\1", text)
    mark = error.problem_mark or error.context_mark
    return text if mark is None else f"{text} (line {mark.line + 1}, column {mark.column + 1})"


def resolve_config(linker_config_json: str | None, environ: Mapping[str, str]) -> Config:
    """The configuration of this server: the file $KRUL_CONFIG names, else the one that SGLang's linker flag
    names as {"config_file": "..."}, else the built-in default. Raises ConfigError.
    """
    # Read even where KRUL_CONFIG wins, so that a mistake in the flag does not wait for another day.
    flag_path = _config_file(linker_config_json, environ)
    variable = environ.get("KRUL_CONFIG", "")
    if variable:
        return load_config(_expand_file(variable, "KRUL_CONFIG", environ), environ)
    if flag_path is not None:
        return load_config(flag_path, environ)
    return parse_config({}, "built-in default", environ)


def to_mapping(config: Config) -> dict[str, object]:
    """What parse_config would read the same configuration from: plain numbers and texts only."""
    mapping: dict[str, object] = {}
    for name, section in _SECTIONS.items():
        values = getattr(config, name)
        if values is not None:
            values = {key.name: _plain(getattr(values, key.name)) for key in fields(section)}
        mapping[name] = values
    return mapping


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, TenantRuleConfig):
        return {key.name: getattr(value, key.name) for key in fields(value)}
    # A dollar sign in a text or path would be read as a variable.
    return str(value).replace("$", "$$") if isinstance(value, str | Path) else value


def _config_file(linker_config_json: str | None, environ: Mapping[str, str]) -> Path | None:
    if not linker_config_json:
        return None
    expected = """expected JSON such as '{"config_file": "/etc/sgl-krul.yaml"}'"""
    try:
        value = json.loads(linker_config_json)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{_LINKER_FLAG}: {_shown(linker_config_json)} is not JSON ({error}): {expected}. "
            "Check the shell's quotes."
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{_LINKER_FLAG}: {_shown(value)} cannot be used: {expected}.")
    _check_keys(value, ("config_file",), _LINKER_FLAG)
    if "config_file" not in value:
        return None
    return _expand_file(value["config_file"], f"{_LINKER_FLAG}: config_file", environ)


def _expand_file(value: object, source: str, environ: Mapping[str, str]) -> Path:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigError(
            f"{source}: {_shown(value)} cannot be used: expected the path of a YAML file. "
            "Leave it out for the built-in default."
        )
    return Path(str(home(environ)) + value[1:]) if value.startswith("~/") else Path(value)


def _parse_section(
    section: type[_S], given: Mapping[str, object], source: str, name: str, environ: Mapping[str, str]
) -> _S:
    keys: tuple[Field[Any], ...] = fields(section)  # type: ignore[arg-type]
    _check_keys(given, tuple(key.name for key in keys), source, f"{name}.", _DOTTED)
    values: dict[str, object] = {}
    for key in keys:
        if key.name in given:
            dotted = f"{source}: {name}.{key.name}"
            way_out = f"the section {name} out" if _required(key) else "the key out for the default"
            values[key.name] = _read_leaf(key.metadata["leaf"], given[key.name], dotted, environ, way_out)
        elif section is SsdConfig and key.name == "path":
            values[key.name] = default_ssd_path(environ)
        elif _required(key):
            raise ConfigError(
                f"{source}: {name}.{key.name}: missing: expected {key.metadata['leaf'].expected}. "
                f"Add it, or leave the section {name} out."
            )
    return section(**values)


def _required(key: Field[Any]) -> bool:
    return key.default is MISSING and key.default_factory is MISSING


def _read_leaf(leaf: Leaf, value: object, dotted: str, environ: Mapping[str, str], way_out: str) -> object:
    try:
        return leaf.read(value, environ)
    except ValueError as error:
        shown = "the value" if leaf.secret else _shown(value)
        raise ConfigError(
            f"{dotted}: {shown} cannot be used ({error}): expected {leaf.expected}. "
            f"Correct it, or leave {way_out}."
        ) from error


def _check_keys(
    given: Mapping[str, object],
    known: Sequence[str],
    source: str,
    prefix: str = "",
    elsewhere: Sequence[str] = (),
) -> None:
    for number, key in enumerate(given, start=1):
        if key in known:
            continue
        near = [dotted for dotted in elsewhere if dotted.split(".")[1] == key]
        near = near or [prefix + name for name in difflib.get_close_matches(str(key), known, n=1)]
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        where, section = f"{prefix}{str(key)[:80]}", prefix.removesuffix(".")
        if section in _SECRET and not (near and str(key).isidentifier()):
            # To YAML `{password:a,b}` is the keys `password:a` and `b`.
            where = f"{section}: key {number} (not shown, it may be part of a password)"
        raise ConfigError(f"{source}: {where}: unknown key.{hint} Known here: {', '.join(known)}.")


def _shown(value: object) -> str:
    shortener = reprlib.Repr()
    shortener.maxstring = 120  # a path should stay readable
    return shortener.repr(value)


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where PyYAML keeps the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key_node.value!r} is given twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)
