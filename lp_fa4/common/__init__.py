"""Kernel parts that no architecture owns: sequence arithmetic and number formats on the device.

Every module here imports ``cutlass``; import them from kernels only, never from a public module.
"""
