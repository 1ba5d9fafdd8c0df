"""Parts that no architecture owns: sequence arithmetic and number formats on the device, skeletons of kernels, what hosts do alike.

Every module here but ``backward_host`` imports ``cutlass``; import them from kernels only, never from a public module.
"""
