"""The errors of the emulator. Each message says where: kernel, PTX line, warp."""

from __future__ import annotations


class EmulatorError(Exception):
    """Anything the emulated program did that hardware would not do, or that the emulator does not model."""


class UnsupportedError(EmulatorError):
    """An opcode, qualifier, shape or descriptor field that the emulator does not model: it stops, it never guesses."""


class MemoryFaultError(EmulatorError):
    """An access outside every allocation, misaligned, or to memory of the wrong kind."""


class DeadlockError(EmulatorError):
    """No warp and no asynchronous operation can proceed; the message lists what each one waits for."""


class StepLimitError(EmulatorError):
    """The run executed more instructions than its limit."""


class BarrierError(EmulatorError):
    """A barrier used wrongly: over-arrival, use before initialisation, transaction count below zero."""


class RaceError(EmulatorError):
    """Two accesses that no synchronisation orders."""


class LaunchError(EmulatorError):
    """A launch that could not be captured: unknown library, unmodelled runtime call."""
