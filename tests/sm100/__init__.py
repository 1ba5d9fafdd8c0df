"""Blackwell kernels on a machine that has none: compiled for both targets, executed by the emulator."""
