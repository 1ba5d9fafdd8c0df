"""``python -m benchmarks <command> --config FILE [key=value ...]``: picks the command, imports it only then, and runs its ``main``.

A command that is missing in this installation is not listed. Errors of the user (a configuration or a data file that cannot be used) are
printed as one line on stderr with exit code 2; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Sequence

COMMANDS = {
    "module": "time the PMA module, forward and backward, per precision",
    "kernels": "time each kernel against its limit",
    "clocks": "count the clock that attention kernels run at, on random and on constant operands",
    "numerics": "signal-to-noise ratio of every output and gradient against FP64 and BF16",
    "train": "train one recommendation model in BF16 and in MXFP8 and compare normalized entropy",
    "report": "write the tables of the pages anew from the committed records",
}


def available() -> dict[str, str]:
    """The commands whose module is installed, with their one-line descriptions, in the order in which they are listed."""
    return {name: text for name, text in COMMANDS.items() if importlib.util.find_spec(f"benchmarks.{name}") is not None}


def usage() -> str:
    """The help text: every available command with its description."""
    commands = available()
    width = max(map(len, commands), default=0)
    lines = [f"usage: python -m benchmarks {{{','.join(commands)}}} --config FILE [key=value ...]", "", "commands:"]
    lines += [f"  {name:<{width}}  {text}" for name, text in commands.items()]
    lines += ["", "python -m benchmarks COMMAND --help lists the keys of its configuration."]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments after the program's name; `sys.argv[1:]` if None.

    Returns:
        the process's exit code: 0, or 2 when the command line, the configuration or the data cannot be used.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    commands = available()
    if name not in commands:
        near = difflib.get_close_matches(name, commands, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        print(f"error: unknown command {name!r}; available: {', '.join(commands)}.{hint}", file=sys.stderr)
        return 2
    from benchmarks.config import UserError

    try:
        return int(importlib.import_module(f"benchmarks.{name}").main(rest) or 0)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
