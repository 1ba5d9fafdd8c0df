"""Compact scale grids to the swizzled buffers of tensor cores, and back."""
