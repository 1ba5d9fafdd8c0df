"""Configuration: what YAML and overrides become, and how every mistake is named."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from benchmarks.config import ConfigError, UserError, describe, known_keys, load, parse_command_line, setting, to_dict


@dataclass(frozen=True)
class Inner:
    width: int = setting(64, "width of a row")
    rate: float = 0.1
    kind: Literal["sum", "concat"] = "sum"

    def __post_init__(self):
        if self.width < 1:
            raise ValueError(f"width: got {self.width}, expected at least 1")


@dataclass(frozen=True)
class Outer:
    name: str = setting("run", "what to call it")
    inner: Inner = field(default_factory=Inner)
    seeds: tuple[int, ...] = (0, 1)
    path: Path | None = None
    flag: bool = False
    shapes: dict[str, int] = field(default_factory=dict)
    rows: list[Inner] = field(default_factory=list)
    free: Any = None


def read(text, overrides=(), cls=Outer, tmp=None):
    file = tmp / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return load(cls, file, overrides)


def test_every_type(tmp_path):
    config = read(
        """
        name: demo
        inner: {width: 32, rate: 1e-3, kind: concat}
        seeds: [3, 4, 5]
        path: ~/data/file.inter
        flag: true
        shapes: {a: 1, b: 2}
        rows: [{width: 1}, {}]
        free: [1, {x: 2}]
        """,
        tmp=tmp_path,
    )
    assert config.inner == Inner(32, 0.001, "concat") and config.seeds == (3, 4, 5) and config.flag is True
    assert config.path == Path("~/data/file.inter").expanduser() and config.shapes == {"a": 1, "b": 2}
    assert config.rows == [Inner(1), Inner()] and config.free == [1, {"x": 2}]
    assert to_dict(config)["rows"][0] == {"width": 1, "rate": 0.1, "kind": "sum"}
    with pytest.raises(AttributeError):
        config.name = "frozen"


def test_an_empty_file_and_no_file_are_the_defaults(tmp_path):
    assert read("", tmp=tmp_path) == read("# only a comment\n", tmp=tmp_path) == load(Outer) == Outer()


def test_an_int_is_a_float_and_a_bool_is_no_number(tmp_path):
    rate = read("inner: {rate: 2}", tmp=tmp_path).inner.rate
    assert rate == 2.0 and type(rate) is float
    for text in ("inner: {rate: true}", "inner: {width: true}", "seeds: [true]"):
        with pytest.raises(ConfigError, match=r"True \(bool\)"):
            read(text, tmp=tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nmae: x", r"unknown key 'nmae'; did you mean 'name'\?.*known keys: name, inner"),
        ("inner: {widht: 3}", r"unknown key 'inner.widht'; did you mean 'inner.width'\?"),
        ("rows: [{}, {rat: 1}]", r"unknown key 'rows\[1\].rat'; did you mean 'rows\[1\].rate'\?"),
        ("zzzzzz: 1", r"unknown key 'zzzzzz' \(known keys"),
        ("name: 3", r"name: got 3 \(int\), expected str"),
        ("inner: {width: 1.5}", r"inner.width: got 1.5 \(float\), expected int"),
        ("inner: {width: ten}", r"inner.width: got 'ten' \(str\), expected int"),
        ("inner: {rate: fast}", r"inner.rate: got 'fast' \(str\), expected float"),
        ("inner: {kind: sums}", r"inner.kind: got 'sums' \(str\), expected one of 'sum', 'concat'. Did you mean 'sum'\?"),
        ("inner: 3", r"inner: got 3, expected a section with keys width, rate, kind"),
        ("inner: {width: 0}", r"inner.width: got 0, expected at least 1"),
        ("seeds: 3", r"seeds: got 3 \(int\), expected a list of int"),
        ("seeds: [1, x]", r"seeds\[1\]: got 'x' \(str\), expected int"),
        ("path: 3", r"path: got 3 \(int\), expected a path or null"),
        ("flag: 1", r"flag: got 1 \(int\), expected bool"),
        ("name: null", r"name: got None \(NoneType\), expected str"),
        ("shapes: {a: x}", r"shapes.a: got 'x' \(str\), expected int"),
        ("shapes: [1]", r"expected a mapping from str to int"),
        ("- 1", r"got list, expected a mapping of keys"),
        ("name: a\nname: b", r"config.yaml:2: key 'name' is given twice"),
        ("1: a", r"config.yaml:1: key 1 is not text"),
        ("name: [a", r"config.yaml:1:9: not valid YAML"),
    ],
)
def test_mistakes_are_named(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        read(text, tmp=tmp_path)
    assert "config.yaml" in str(caught.value) and isinstance(caught.value, UserError)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"absent.yaml: cannot read the configuration: No such file"):
        load(Outer, tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    with pytest.raises(ConfigError, match=r"latin.yaml: not UTF-8 text \(byte 6\)"):
        load(Outer, tmp_path / "latin.yaml")


@dataclass(frozen=True)
class Needs:
    size: int = setting(help="how many")
    other: int = 1


def test_a_required_key(tmp_path):
    with pytest.raises(ConfigError, match=r"size: required \(int\), not given"):
        read("other: 2", cls=Needs, tmp=tmp_path)
    assert load(Needs, None, ["size=3"]) == Needs(3)


def test_overrides(tmp_path):
    config = read("name: a\ninner: {width: 3}", ["inner.width=5", "inner.rate=1e-2", "name=b", "shapes.x=7", "path=null"], tmp=tmp_path)
    assert config.inner == Inner(5, 0.01) and config.name == "b" and config.shapes == {"x": 7}
    assert load(Outer, None, ["seeds=[7]", "seeds=[8, 9]"]).seeds == (8, 9)
    assert load(Outer, None, ["inner={width: 9}"]).inner.width == 9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("width=3", r"unknown key 'width'; did you mean 'inner.width'\?"),
        ("inner.widt=3", r"did you mean 'inner.width'\?"),
        ("name", r"override 'name': expected key=value"),
        ("=3", r"override '=3': expected key=value"),
        ("seeds=[1", r"override seeds:1:3: not valid YAML"),
        ("inner.width=x", r"inner.width: got 'x' \(str\), expected int"),
        ("name.x=1", r"unknown key 'name.x'"),
    ],
)
def test_wrong_overrides_are_named(text, words):
    with pytest.raises(ConfigError, match=words):
        load(Outer, None, [text])


def test_help_lists_every_key(capsys):
    text = describe(Outer)
    for key in known_keys(Outer):
        assert key in text or key == "inner"
    assert "width of a row [int; default 64]" in text
    with pytest.raises(SystemExit) as done:
        parse_command_line(Outer, ["--help"], "demo", "What it does.")
    assert done.value.code == 0 and "inner.width" in capsys.readouterr().out


def test_command_line_takes_options_and_overrides_in_any_order(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("name: a")
    config = parse_command_line(Outer, ["flag=true", "--config", str(file), "inner.width=2"], "demo", "")
    assert config == Outer(name="a", flag=True, inner=Inner(2))


def test_setting_takes_one_kind_of_default():
    with pytest.raises(ValueError, match="not both"):
        setting(1, factory=list)
