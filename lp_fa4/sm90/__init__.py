"""Kernels for Hopper (sm_90a). See ``README.md`` in this folder for the design and the tuning log.

This module imports nothing heavy; ``cutlass`` is loaded by the first call that needs a kernel.
"""
