"""``compute-sanitizer`` over every kernel, and the emulator's race checker over the same operations; see ``__main__``."""
