"""PTX front end: text of a module → ``Program``: instructions with resolved registers, labels, shared declarations.

Only the subset that compilers emit for kernels is read; anything else raises ``UnsupportedError`` with its line.
Registers are numbered per width class, so that the SIMT core can keep one array per class: ``p`` (predicates), 16, 32,
64 and 128 bits. Eight-bit registers live in the 16-bit class, as PTX allows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from .errors import UnsupportedError

CLASS_OF_TYPE: dict[str, Any] = {"pred": "p", "b128": 128}
for _bits, _names in (
    (16, "b8 u8 s8 b16 u16 s16 f16 bf16"),
    (32, "b32 u32 s32 f32 f16x2 bf16x2"),
    (64, "b64 u64 s64 f64 f32x2"),
):
    CLASS_OF_TYPE.update(dict.fromkeys(_names.split(), _bits))


class Reg:
    """A register: width class and index in it."""

    __slots__ = ("cls", "idx", "name")

    def __init__(self, cls: Any, idx: int, name: str) -> None:
        self.cls, self.idx, self.name = cls, idx, name

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Imm:
    """An integer immediate."""

    value: int

    def __repr__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class FloatImm:
    """A floating-point immediate, as its bits (32 or 64)."""

    bits: int
    width: int

    def __repr__(self) -> str:
        return f"0{'f' if self.width == 32 else 'd'}{self.bits:0{self.width // 4}X}"


@dataclass(frozen=True)
class Sym:
    """The address of a variable, or a label."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Sreg:
    """A special register, ``%tid.x``."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Mem:
    """``[base + offset]``."""

    base: Any
    offset: int

    def __repr__(self) -> str:
        return f"[{self.base}+{self.offset}]" if self.offset else f"[{self.base}]"


@dataclass(frozen=True)
class TensorMem:
    """``[descriptor, {c0, c1, ...}]`` or any other bracket with several items."""

    items: tuple[Any, ...]


@dataclass(frozen=True)
class Vec:
    """``{a, b, ...}``."""

    items: tuple[Any, ...]

    def __repr__(self) -> str:
        return "{" + ", ".join(map(repr, self.items)) + "}"


@dataclass(frozen=True)
class Pair:
    """``a|b``."""

    items: tuple[Any, ...]


@dataclass(frozen=True)
class Not:
    """``!p``."""

    operand: Any


def registers_of(a: Any) -> list[Reg]:
    """Registers that an operand names, in order."""
    if isinstance(a, Reg):
        return [a]
    if isinstance(a, (Vec, Pair, TensorMem)):
        return [r for x in a.items for r in registers_of(x)]
    if isinstance(a, Mem):
        return registers_of(a.base)
    return registers_of(a.operand) if isinstance(a, Not) else []


class Sink:
    """``_``: a result that is dropped."""

    def __repr__(self) -> str:
        return "_"


SINK = Sink()


class Instr:
    """One instruction. ``parts`` is the opcode split at dots (``::`` kept inside a part), ``plan`` what an engine works out once."""

    __slots__ = ("args", "gneg", "guard", "index", "label", "line", "loc", "op", "parts", "plan")

    def __init__(self, op: str, args: list[Any], guard: Reg | None, gneg: bool, line: int, loc: str) -> None:
        self.op, self.args, self.guard, self.gneg, self.line, self.loc = op, args, guard, gneg, line, loc
        self.parts = op.split(".")
        self.label: str | None = None
        self.plan: Any = None
        self.index = -1

    def __repr__(self) -> str:
        guard = f"@{'!' if self.gneg else ''}{self.guard} " if self.guard else ""
        return f"{guard}{self.op} {', '.join(map(repr, self.args))}"

    def where(self) -> str:
        """``PTX line 12 (kernel.py:34): opcode ...`` for messages."""
        source = f" ({self.loc})" if self.loc else ""
        return f"PTX line {self.line}{source}: {self!r}"

    def unsupported(self, what: str) -> UnsupportedError:
        return UnsupportedError(f"{what}; {self.where()}")


@dataclass
class Program:
    """A parsed entry: instructions, labels (name → index), registers per class, shared variables (alignment, size)."""

    entry: str
    instrs: list[Instr] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    counts: dict[Any, int] = field(default_factory=lambda: {"p": 0, 16: 0, 32: 0, 64: 0, 128: 0})
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)
    local: dict[str, tuple[int, int]] = field(default_factory=dict)
    required_threads: tuple[int, ...] | None = None
    minnctapersm: int = 1
    maxnreg: int = 0


def split_top(text: str) -> list[str]:
    """Split at the commas that are outside every bracket."""
    out, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        if ch in "{[(":
            depth += 1
        elif ch in "}])":
            depth -= 1
        elif ch == "," and not depth:
            out.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    if last:
        out.append(last)
    return out


_LABEL = re.compile(r"([\w$%]+)\s*:(?!:)")
_INT = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?")
_MEM = re.compile(r"([\w$%.]+)\s*(?:\+\s*(-?\w+))?")
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.[busf](\d+)\s+([\w$]+)(?:\[(\d*)\])?")
_LOCAL = re.compile(r"\.local\s+(?:\.align\s+(\d+)\s+)?\.[busf](\d+)\s+([\w$]+)\[(\d+)\]")
_IGNORED = (".pragma", ".shared", ".branchtargets", ".global", ".reqntid", ".maxntid", ".minnctapersm")


class _Parser:
    def __init__(self, text: str, entry: str) -> None:
        text = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group(0)), text, flags=re.S)
        # inside inline assembly the compiler counts the assembly's own lines on from the source line: keep the latter
        text = re.sub(
            r"// begin inline asm.*?// end inline asm",
            lambda m: re.sub(r"\.loc[ \t][^\n]*", lambda x: " " * len(x.group(0)), m.group(0)),
            text,
            flags=re.S,
        )
        self.text = re.sub(r"//[^\n]*", lambda m: " " * len(m.group(0)), text)
        self.program = Program(entry)
        self.files = {int(n): name.rsplit("/", 1)[-1] for n, name in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', self.text)}
        self.regs: list[dict[str, Any]] = [{}]
        self.scopes: list[dict[str, str]] = [{}]
        self.loc = ""

    def fail(self, what: str, line: int) -> UnsupportedError:
        return UnsupportedError(f"PTX line {line}: {what}")

    def declare(self, cls: Any, name: str) -> Reg:
        reg = Reg(cls, self.program.counts[cls], name)
        self.program.counts[cls] += 1
        self.regs[-1][name] = reg
        return reg

    def look(self, name: str) -> Any:
        for scope in reversed(self.regs):
            if name in scope:
                return scope[name]
        return None

    def operand(self, s: str, line: int) -> Any:
        s = s.strip()
        reg = self.look(s)
        if reg is not None:
            return reg
        first = s[:1]
        if first == "{":
            return Vec(tuple(self.operand(x, line) for x in split_top(s[1:-1])))
        if first == "[":
            inner = split_top(s[1:-1])
            if len(inner) > 1:
                return TensorMem(tuple(self.operand(x, line) for x in inner))
            m = _MEM.fullmatch(inner[0])
            if m is None:
                raise self.fail(f"address {s!r} is not understood", line)
            return Mem(self.operand(m.group(1), line), int(m.group(2), 0) if m.group(2) else 0)
        if "|" in s:
            return Pair(tuple(self.operand(x, line) for x in s.split("|")))
        if s == "_":
            return SINK
        if first == "!":
            return Not(self.operand(s[1:], line))
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", s):
            return FloatImm(int(s[2:], 16), 32)
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", s):
            return FloatImm(int(s[2:], 16), 64)
        if _INT.fullmatch(s):
            return Imm(int(s.rstrip("U"), 0))
        if first == "%":
            return Sreg(s)
        if re.fullmatch(r"[\w$]+", s):
            return Sym(s)
        raise self.fail(f"operand {s!r} is not understood", line)

    def directive(self, s: str, line: int) -> None:
        m = re.fullmatch(r"\.reg\s+\.(v2|v4)\s+\.(\w+)\s+([\w$%]+)", s)
        if m:
            parts = [self.declare(CLASS_OF_TYPE[m.group(2)], f"{m.group(3)}.{c}") for c in "xyzw"[: int(m.group(1)[1])]]
            self.regs[-1][m.group(3)] = Vec(tuple(parts))
            return
        m = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", s, re.S)
        if m:
            if m.group(1) not in CLASS_OF_TYPE:
                raise self.fail(f"register type {m.group(1)!r}", line)
            cls = CLASS_OF_TYPE[m.group(1)]
            for name in m.group(2).split(","):
                ranged = re.fullmatch(r"([\w$%]+)<(\d+)>", name.strip())
                if ranged:
                    for i in range(int(ranged.group(2))):
                        self.declare(cls, f"{ranged.group(1)}{i}")
                else:
                    self.declare(cls, name.strip())
            return
        m = _LOCAL.fullmatch(s)
        if m:
            self.program.local[m.group(3)] = (int(m.group(1) or 4), int(m.group(2)) // 8 * int(m.group(4)))
            return
        if not s.startswith(_IGNORED):
            raise self.fail(f"directive {s!r}", line)

    def parse(self) -> Program:
        text, program = self.text, self.program
        for align, bits, name, count in _SHARED.findall(text):
            is_extern = re.search(r"\b" + re.escape(name) + r"\[\]", text) is not None
            size = 0 if is_extern else int(bits) // 8 * int(count or 1)
            program.shared[name] = (int(align or 4), size)
        head = re.search(r"\.entry\s+" + re.escape(program.entry) + r"\s*(\(.*?\))?([^({]*?)\{", text, re.S)
        if head is None:
            raise UnsupportedError(f"entry {program.entry!r} is not in this PTX")
        needed = re.search(r"\.reqntid\s+([\d,\s]+)", head.group(2))
        if needed:
            program.required_threads = tuple(int(x) for x in needed.group(1).split(","))
        for name in ("minnctapersm", "maxnreg"):
            found = re.search(rf"\.{name}\s+(\d+)", head.group(2))
            if found:
                setattr(program, name, int(found.group(1)))
        pos, line, counted = head.end(), 0, 0
        uid = 0
        raw: list[tuple[Instr, list[dict[str, str]]]] = []
        n = len(text)
        while pos < n:
            ch = text[pos]
            if ch.isspace() or ch == ";":
                pos += 1
                continue
            line += text.count("\n", counted, pos)
            counted = pos
            here = line + 1
            if ch == "{":
                self.regs.append({})
                self.scopes.append({})
                pos += 1
                continue
            if ch == "}":
                self.regs.pop()
                self.scopes.pop()
                pos += 1
                if not self.regs:
                    break
                continue
            m = _LABEL.match(text, pos)
            if m:
                uid += 1
                unique = f"{m.group(1)}#{uid}"
                self.scopes[-1][m.group(1)] = unique
                program.labels[unique] = len(program.instrs)
                pos = m.end()
                continue
            if text.startswith((".loc ", ".loc\t"), pos):  # ended by the line, not by a semicolon
                end = text.index("\n", pos)
                m = re.match(r"\.loc\s+(\d+)\s+(\d+)", text[pos:end])
                if m:
                    self.loc = f"{self.files.get(int(m.group(1)), '?')}:{m.group(2)}"
                pos = end
                continue
            end = text.index(";", pos)
            statement, pos = text[pos:end].strip(), end + 1
            if statement[0] == ".":
                self.directive(statement, here)
                continue
            instr = self.instruction(statement, here)
            program.instrs.append(instr)
            if instr.parts[0] == "bra":
                raw.append((instr, list(self.scopes)))
        for instr, scopes in raw:
            name = instr.args[0].name
            instr.label = next((s[name] for s in reversed(scopes) if name in s), None)
            if instr.label is None:
                raise instr.unsupported(f"branch target {name!r} is not a label in scope")
        for i, instr in enumerate(program.instrs):
            instr.index = i
        return program

    def instruction(self, s: str, line: int) -> Instr:
        guard, negated = None, False
        m = re.match(r"@(!?)([\w$%]+)\s+", s)
        if m:
            guard, negated = self.look(m.group(2)), bool(m.group(1))
            if guard is None:
                raise self.fail(f"guard {m.group(2)!r} is not declared", line)
            s = s[m.end() :]
        op, _, rest = s.partition(" ") if " " in s else s.partition("\t")
        op, tab, more = op.partition("\t")
        if tab:
            rest = more + " " + rest
        return Instr(op.strip(), [self.operand(x, line) for x in split_top(rest)], guard, negated, line, self.loc)


def parse(text: str, entry: str) -> Program:
    """Parse the kernel ``entry`` of a PTX module.

    Raises:
        UnsupportedError: a directive, operand or register type outside the subset, with its line.
    """
    return _Parser(text, entry).parse()
