"""Command line of the project: ``python -m benchmarks {module,kernels,numerics,train} --config FILE [key=value ...]``.

Every command is a module of this package with ``main(argv) -> int``. They share `config` (YAML to frozen dataclass), `harness` (versions,
machine, tables, JSON, interleaved timing) and `plots` (one house style for every figure).
"""
