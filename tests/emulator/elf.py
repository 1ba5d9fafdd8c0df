"""A shared object written byte by byte, so that launch capture needs no compiler.

The CuTe DSL's host code calls about sixty C functions of ``libcute_dsl_runtime.so``. ``write_trampolines`` writes an
x86-64 ELF shared object that exports such names; each is one ``jmp *slot(%rip)`` instruction, and the slots are a table
in writable memory that the caller fills with ``ctypes`` callbacks after loading the object (symbol ``SLOTS``).

Layout of the file (System V ABI, AMD64 supplement): ELF header, program headers, hash table, symbol table, strings,
dynamic section and code in one read/execute segment; the slot table in a second, writable one.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Sequence
from pathlib import Path

SLOTS = "emulator_slots"
_PAGE = 0x1000
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_SONAME = 0, 4, 5, 6, 10, 11, 14


def write_trampolines(path: Path, names: Sequence[str]) -> None:
    """Write a shared object to ``path`` that exports every name of ``names`` and the table ``SLOTS``.

    Raises:
        NotImplementedError: on a machine that is not x86-64 (the trampoline is one x86-64 instruction).
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise NotImplementedError(f"machine {platform.machine()!r}: trampolines are written for x86_64 only")
    symbols = [*names, SLOTS]
    strings = b"\0"
    offsets = []
    for name in symbols:
        offsets.append(len(strings))
        strings += name.encode() + b"\0"
    soname = len(strings)
    strings += path.name.encode() + b"\0"

    n_sym = len(symbols) + 1
    header = 64 + 3 * 56
    hash_at = header
    hash_size = 4 * (2 + 1 + n_sym)
    sym_at = (hash_at + hash_size + 7) // 8 * 8
    str_at = sym_at + 24 * n_sym
    dyn_at = (str_at + len(strings) + 7) // 8 * 8
    dyn_size = 16 * 7
    code_at = (dyn_at + dyn_size + 15) // 16 * 16
    code_size = 8 * len(names)
    text_end = code_at + code_size
    data_at = (text_end + _PAGE - 1) // _PAGE * _PAGE
    data_size = 8 * len(names)

    # One hash bucket: the chain visits every symbol. A few dozen names, looked up once each.
    chain = [0] + [i + 1 if i + 1 < n_sym else 0 for i in range(1, n_sym)]
    hash_table = struct.pack(f"<{3 + n_sym}I", 1, n_sym, 1, *chain)
    sym_table = bytes(24)
    for i, at in enumerate(offsets):
        is_slots = i == len(names)
        value = data_at if is_slots else code_at + 8 * i
        info = (1 << 4) | (1 if is_slots else 2)  # STB_GLOBAL, STT_OBJECT or STT_FUNC
        sym_table += struct.pack("<IBBHQQ", at, info, 0, 1, value, data_size if is_slots else 8)
    dynamic = b"".join(
        struct.pack("<QQ", tag, value)
        for tag, value in (
            (_DT_HASH, hash_at),
            (_DT_STRTAB, str_at),
            (_DT_SYMTAB, sym_at),
            (_DT_STRSZ, len(strings)),
            (_DT_SYMENT, 24),
            (_DT_SONAME, soname),
            (_DT_NULL, 0),
        )
    )
    code = b""
    for i in range(len(names)):
        here = code_at + 8 * i
        code += b"\xff\x25" + struct.pack("<i", data_at + 8 * i - (here + 6)) + b"\xcc\xcc"

    ident = b"\x7fELF" + bytes([2, 1, 1, 0]) + bytes(8)
    elf_header = ident + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 3, 64, 0, 0)
    programs = struct.pack("<IIQQQQQQ", _PT_LOAD, 5, 0, 0, 0, text_end, text_end, _PAGE)
    programs += struct.pack("<IIQQQQQQ", _PT_LOAD, 6, data_at, data_at, data_at, data_size, data_size, _PAGE)
    programs += struct.pack("<IIQQQQQQ", _PT_DYNAMIC, 4, dyn_at, dyn_at, dyn_at, dyn_size, dyn_size, 8)

    image = bytearray(data_at + data_size)
    for at, blob in (
        (0, elf_header + programs),
        (hash_at, hash_table),
        (sym_at, sym_table),
        (str_at, strings),
        (dyn_at, dynamic),
        (code_at, code),
    ):
        image[at : at + len(blob)] = blob
    path.write_bytes(bytes(image))
