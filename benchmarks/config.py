"""Configuration files: YAML into frozen dataclasses, with every mistake named.

A command describes its settings as a frozen dataclass, possibly of nested dataclasses; `setting` adds a help text to a field:

    @dataclass(frozen=True)
    class TrainConfig:
        steps: int = setting(300, "optimizer steps of one run")

`load` fills it from a YAML file and ``key=value`` overrides (``model.dim=64`` for a nested field). What it refuses, always naming the
key: a key that nobody knows (the nearest known one is suggested), a key given twice, a value of another type, a missing required key, and
whatever `__post_init__` of the dataclass refuses with ValueError.

Types understood: bool, int, float, str, Path, None, unions, Literal, tuple[T, ...], list[T], dict[str, T], nested dataclasses. An int is
accepted where a float is wanted, and so is text such as ``1e-3``, which YAML 1.1 reads as a string. A bool is never a number.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml

T = TypeVar("T")

_FLOAT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


class UserError(ValueError):
    """Something the user can repair: a configuration, a data file, a device that is not there. Shown without a traceback."""


class ConfigError(UserError):
    """A configuration file or an override that cannot be used; the message names file, key, value and what is expected."""


def setting(default: Any = dataclasses.MISSING, help: str = "", *, factory: Any = dataclasses.MISSING) -> Any:
    """A dataclass field with a help text, shown by ``--help``. Without `default` and `factory` the key is required."""
    if default is not dataclasses.MISSING and factory is not dataclasses.MISSING:
        raise ValueError("setting() takes a default or a factory, not both")
    return dataclasses.field(default=default, default_factory=factory, metadata={"help": help})


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice (the plain one keeps the last in silence)."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            mark = key_node.start_mark
            raise ConfigError(f"{mark.name}:{mark.line + 1}: key {key!r} is not text (quote it?)")
        if key in seen:
            mark = key_node.start_mark
            raise ConfigError(f"{mark.name}:{mark.line + 1}: key {key!r} is given twice")
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _parse_yaml(text: str, name: str) -> Any:
    loader = _Loader(text)
    loader.name = name
    try:
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    finally:
        loader.dispose()


def _type_name(kind: Any) -> str:
    if kind is type(None):
        return "null"
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(a) for a in get_args(kind))
    if origin in (tuple, list):
        return f"a list of {_type_name(get_args(kind)[0])}"
    if origin is dict:
        return f"a mapping from str to {_type_name(get_args(kind)[1])}"
    if kind is Path:
        return "a path"
    return getattr(kind, "__name__", str(kind))


def _convert(value: Any, kind: Any, key: str) -> Any:
    """`value` as YAML gave it, as an instance of the annotation `kind`; ConfigError names `key`, the value and what is expected."""
    wrong = ConfigError(f"{key}: got {value!r} ({type(value).__name__}), expected {_type_name(kind)}")
    origin = get_origin(kind)
    if kind is Any:
        return value
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ConfigError(f"{key}: got {value!r}, expected a section with keys {', '.join(_fields(kind))}")
        return _build(kind, value, f"{key}.")
    if origin in (Union, types.UnionType):
        members = get_args(kind)
        if value is None and type(None) in members:
            return None
        inner: ConfigError | None = None
        for member in members:
            if member is type(None):
                continue
            try:
                return _convert(value, member, key)
            except ConfigError as error:
                if dataclasses.is_dataclass(member) and isinstance(value, dict):
                    inner = error
        raise inner or wrong
    if origin is Literal:
        for allowed in get_args(kind):
            if value == allowed and type(value) is type(allowed):
                return allowed
        near = difflib.get_close_matches(str(value), [str(a) for a in get_args(kind)], n=1)
        raise ConfigError(f"{wrong}. Did you mean {near[0]!r}?" if near else str(wrong))
    if origin in (tuple, list):
        if not isinstance(value, (list, tuple)):
            raise wrong
        item = get_args(kind)[0]
        return origin(_convert(v, item, f"{key}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise wrong
        return {k: _convert(v, get_args(kind)[1], f"{key}.{k}") for k, v in value.items()}
    if kind is bool:
        if isinstance(value, bool):
            return value
    elif kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif kind is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str) and _FLOAT.fullmatch(value):
            return float(value)
    elif kind is Path:
        if isinstance(value, str):
            return Path(value).expanduser()
    elif kind is str and isinstance(value, str):
        return value
    elif kind is type(None) and value is None:
        return None
    raise wrong


def _fields(cls: type) -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(cls) if f.init}


def _section(kind: Any) -> type | None:
    """The dataclass of a section, also of one that may be null; None for anything else."""
    for member in get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,):
        if isinstance(member, type) and dataclasses.is_dataclass(member):
            return member
    return None


def known_keys(cls: type, prefix: str = "") -> list[str]:
    """Every dotted key that a configuration of class `cls` has, sections before their contents."""
    hints, keys = typing.get_type_hints(cls), []
    for name in _fields(cls):
        keys.append(prefix + name)
        if (section := _section(hints[name])) is not None:
            keys += known_keys(section, f"{prefix}{name}.")
    return keys


def _unknown(key: str, known: Sequence[str]) -> str:
    """The message for a key that nobody knows. A key with the right last part (``steps`` for ``train.steps``) is nearer than a typo."""
    leaf = [k for k in known if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    near = leaf or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown key {key!r}{hint} (known keys: {', '.join(known)})"


def _build(cls: type, data: dict[str, Any], prefix: str = "") -> Any:
    fields, hints = _fields(cls), typing.get_type_hints(cls)
    for key in data:
        if key not in fields:
            raise ConfigError(_unknown(prefix + key, [prefix + name for name in fields]))
    values = {key: _convert(value, hints[key], prefix + key) for key, value in data.items()}
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{prefix + name}: required ({_type_name(hints[name])}), not given")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{prefix}{error}") from None


def _override(data: dict[str, Any], text: str, cls: type) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {text!r}: expected key=value")
    keys = known_keys(cls)
    if key not in keys and not any(key.startswith(f"{k}.") and _is_dict(cls, k) for k in keys):
        raise ConfigError(_unknown(key, keys))
    path = key.split(".")
    for part in path[:-1]:
        inner = data.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {text!r}: {part!r} is {inner!r}, not a section")
        data = inner
    data[path[-1]] = _parse_yaml(value, f"override {key}")


def _is_dict(cls: type, key: str) -> bool:
    for part in key.split("."):
        kind = typing.get_type_hints(cls).get(part)
        if get_origin(kind) is dict:
            return True
        if not dataclasses.is_dataclass(kind):
            return False
        cls = typing.cast(type, kind)
    return False


def load(cls: type[T], path: str | Path | None = None, overrides: Sequence[str] = ()) -> T:
    """A configuration of class `cls`.

    Args:
        cls: a frozen dataclass.
        path: a YAML file holding a mapping; None starts from the defaults alone. An empty file is an empty mapping.
        overrides: ``key=value`` texts applied after the file, later ones winning; the value is read as YAML.

    Raises:
        ConfigError: naming file, key, value and what is expected.
    """
    data: Any = {}
    where = ""
    if path is not None:
        file = Path(path)
        where = f"{file}: "
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{file}: cannot read the configuration: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}: not UTF-8 text (byte {error.start})") from None
        data = _parse_yaml(text, str(file))
        data = {} if data is None else data
        if not isinstance(data, dict):
            raise ConfigError(f"{file}: got {type(data).__name__}, expected a mapping of keys ({', '.join(_fields(cls))})")
    for text in overrides:
        _override(data, text, cls)
    try:
        return typing.cast(T, _build(cls, data))
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from None


def from_dict(cls: type[T], data: dict[str, Any]) -> T:
    """Inverse of `to_dict`: a configuration from plain values, checked as a file's are. Raises ConfigError."""
    return typing.cast(T, _build(cls, data))


def to_dict(config: Any) -> Any:
    """A configuration as plain dicts, lists, numbers and strings, for the JSON record."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, dict):
        return {k: to_dict(v) for k, v in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_dict(v) for v in config]
    return str(config) if isinstance(config, Path) else config


def _described(cls: type, prefix: str = "") -> list[tuple[str, str]]:
    hints, lines = typing.get_type_hints(cls), []
    for name, field in _fields(cls).items():
        kind = hints[name]
        if dataclasses.is_dataclass(kind):
            lines += _described(typing.cast(type, kind), f"{prefix}{name}.")
            continue
        if field.default is not dataclasses.MISSING:
            default = f"default {json.dumps(to_dict(field.default))}"
        elif field.default_factory is not dataclasses.MISSING:
            default = f"default {json.dumps(to_dict(field.default_factory()))}"
        else:
            default = "required"
        lines.append((prefix + name, f"{field.metadata.get('help', '')} [{_type_name(kind)}; {default}]".strip()))
    return lines


def describe(cls: type) -> str:
    """One line per key: dotted name, help text, type, default as YAML reads it."""
    lines = _described(cls)
    width = max((len(key) for key, _ in lines), default=0)
    return "\n".join(f"  {key:<{width}}  {text}" for key, text in lines)


def parse_command_line(cls: type[T], argv: Sequence[str], command: str, description: str) -> T:
    """The configuration named by ``--config FILE`` and ``key=value`` arguments of ``python -m benchmarks <command>``.

    ``--help`` prints `description` and every key, and exits. Without ``--config`` the defaults of `cls` are used.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {command}",
        description=f"{description}\n\nkeys of the configuration:\n{describe(cls)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with the keys above")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    arguments = parser.parse_intermixed_args(list(argv))
    return load(cls, arguments.config, arguments.overrides)
