"""Launch capture: CuTe DSL host code runs unmodified, and every kernel launch arrives in Python.

The JIT host code does not call the CUDA driver; it calls wrappers (``_cudaLaunchKernelEx`` and others) exported by
``libcute_dsl_runtime.so``. ``install`` puts a stand-in before that library (environment variable ``CUTE_DSL_LIBS``): a
shared object of trampolines (``elf.py``) whose targets are ``ctypes`` callbacks in this file. No driver, no GPU and no
compiler is used.

The PTX of a launch is found by the *loaded library*: the DSL leaves PTX and CUBIN of each compilation; the CUBIN's
digest is recorded with its PTX, and ``_cudaLibraryLoadData`` receives that same CUBIN. Two variants of one kernel name
in one process therefore never mix.

Device memory is host memory: ``as_device`` hands a CPU tensor to TVM-FFI under the device type CUDA, and records its
extent for the bounds checks of ``memory.py``.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import struct
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from .elf import SLOTS, write_trampolines
from .errors import LaunchError

_PARAM_SIZE = {"8": 1, "16": 2, "32": 4, "64": 8}


@dataclass
class Launch:
    """One kernel launch, as the host code asked for it.

    Attributes:
        name: entry name in the PTX.
        ptx: the PTX module that the loaded library was compiled from.
        grid, block, cluster: three extents each; ``grid`` counts thread blocks.
        smem: dynamic shared memory, bytes.
        params: name and bytes of each kernel parameter, in declaration order.
        dependent: may begin before the launch before it has ended (programmatic stream serialization).
    """

    name: str
    ptx: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem: int
    params: dict[str, bytes]
    dependent: bool = False

    def __repr__(self) -> str:
        return f"Launch({self.name[:60]}, grid={self.grid}, block={self.block}, cluster={self.cluster}, smem={self.smem})"


@dataclass
class _Library:
    digest: str
    kernels: dict[int, str] = field(default_factory=dict)


def parameter_sizes(ptx: str, entry: str) -> list[tuple[str, int]]:
    """Names and sizes in bytes of the parameters of ``.entry entry``, in order.

    Raises:
        LaunchError: the entry is missing or a parameter has a form that is not known.
    """
    found = re.search(r"\.entry\s+" + re.escape(entry) + r"\s*(\((.*?)\))?\s*[.{]", ptx, re.S)
    if found is None:
        raise LaunchError(f"entry {entry!r} is not in the PTX of the loaded library")
    out = []
    for text in (found.group(2) or "").split(","):
        text = text.strip()
        if not text:
            continue
        m = re.fullmatch(r"\.param\s+(?:\.align\s+\d+\s+)?\.[busf](\d+)(?:\s+\.\w+)*(?:\s+\.align\s+\d+)?\s+([\w$]+)(?:\[(\d+)\])?", text)
        if m is None or m.group(1) not in _PARAM_SIZE:
            raise LaunchError(f"parameter declaration {text!r} of {entry!r} is not understood")
        out.append((m.group(2), _PARAM_SIZE[m.group(1)] * int(m.group(3) or 1)))
    return out


class _Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]

    def tuple(self) -> tuple[int, int, int]:
        return (self.x, self.y, self.z)


class _Attribute(ctypes.Structure):  # cudaLaunchAttribute: id, padding to 8, a 64-byte union
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _LaunchConfig(ctypes.Structure):  # cudaLaunchConfig_t
    _fields_ = [
        ("grid", _Dim3),
        ("block", _Dim3),
        ("smem", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


# cudaLaunchAttributeID. Programmatic stream serialization (6) and cooperative launch (2) change nothing here: launches
# run one after another, and clusters of a grid are all able to be resident.
_ATTRIBUTE_COOPERATIVE, _ATTRIBUTE_CLUSTER, _ATTRIBUTE_PDL, _ATTRIBUTE_PREFERRED_CLUSTER = 2, 4, 6, 11
_IGNORED_ATTRIBUTES = {0, 1, _ATTRIBUTE_COOPERATIVE, 8}  # 0 ignore, 1 access policy, 8 priority

# cudaDeviceAttr values that host code asks for.
_DEVICE_ATTRIBUTES = {
    2: 1024,  # max block dim x
    3: 1024,
    4: 64,
    5: 2**31 - 1,  # max grid dim x
    6: 65535,
    7: 65535,
    1: 1024,  # max threads per block
    8: 49152,  # shared memory per block
    16: 148,  # multiprocessors
    97: 232448,  # shared memory per block, opt in
    81: 233472,  # shared memory per multiprocessor
}

_UNMODELLED = [
    "_cuLibraryGetGlobal",
    "_cuLibraryGetKernelCount",
    "_cuLibraryGetManaged",
    "_cuLibraryGetModule",
    "_cuLibraryGetUnifiedFunction",
    "_cuLibraryLoadFromFile",
    "_cuTensorMapEncodeTiled",
    "_cudaEventCreate",
    "_cudaEventDestroy",
    "_cudaEventElapsedTime",
    "_cudaEventRecord",
    "_cudaFree",
    "_cudaFreeAsync",
    "_cudaFreeHost",
    "_cudaGetDeviceProperties",
    "_cudaGraphDestroy",
    "_cudaGraphExecDestroy",
    "_cudaGraphInstantiate",
    "_cudaGraphLaunch",
    "_cudaLaunchKernel",
    "_cudaLibraryGetGlobal",
    "_cudaLibraryGetKernelCount",
    "_cudaLibraryGetManaged",
    "_cudaLibraryGetUnifiedFunction",
    "_cudaLibraryLoadFromFile",
    "_cudaMalloc",
    "_cudaMallocAsync",
    "_cudaMallocHost",
    "_cudaMallocManaged",
    "_cudaMemcpy",
    "_cudaMemcpyAsync",
    "_cudaMemset",
    "_cudaMemsetAsync",
    "_cudaOccupancyMaxActiveBlocksPerMultiprocessor",
    "_cudaProfilerStart",
    "_cudaProfilerStop",
    "_cudaStreamAddCallback",
    "_cudaStreamBeginCapture",
    "_cudaStreamCreate",
    "_cudaStreamDestroy",
    "_cudaStreamEndCapture",
    "_cudaStreamWaitEvent",
    "CuteDSLRT_Function_Run",
    "CuteDSLRT_GetErrorString",
    "CuteDSLRT_Module_Create_From_Bytes",
    "CuteDSLRT_Module_Destroy",
    "CuteDSLRT_Module_Get_Function",
]

_FATBIN_MAGIC = 0xBA55ED50
_P, _I, _U = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint


def _store(address: int, ctype: Any, value: int) -> None:
    ctypes.cast(address, ctypes.POINTER(ctype))[0] = value


def _cubin_of_fatbin(address: int) -> bytes:
    """The CUBIN inside the fat binary at ``address``: a 16-byte header (magic, version, header size, content size),
    then one entry (u16 kind, u16 version, u32 header size, u64 content size, ...) for the one target compiled for."""
    magic, _, header_size, _ = struct.unpack("<IHHQ", ctypes.string_at(address, 16))
    if magic != _FATBIN_MAGIC:
        raise LaunchError(f"library image starts with {magic:#x}; expected a fat binary ({_FATBIN_MAGIC:#x})")
    entry = address + header_size
    kind, _, entry_header, size = struct.unpack("<HHIQ", ctypes.string_at(entry, 16))
    cubin = ctypes.string_at(entry + entry_header, size)
    if kind != 2 or cubin[:4] != b"\x7fELF":
        raise LaunchError(f"first fat binary entry has kind {kind}, bytes {cubin[:4]!r}; expected an uncompressed CUBIN")
    return cubin


class Runtime:
    """The stand-in for the CUDA runtime: loaded libraries, kernels, and the handler that receives launches."""

    def __init__(self) -> None:
        self.ptx_of_cubin: dict[str, str] = {}
        self.libraries: dict[int, _Library] = {}
        self.kernels: dict[int, tuple[_Library, str]] = {}
        self.handler: Callable[[Launch], None] | None = None
        self.launches: list[Launch] = []
        self.error: BaseException | None = None
        self._next = 0x10000
        self._callbacks: list[Any] = []

    # --- bookkeeping -------------------------------------------------------------------------------------------
    def record_artifacts(self, ptx: str | None, cubin: bytes | None) -> None:
        """Remember the PTX of a compilation under the digest of its CUBIN."""
        if ptx and cubin:
            self.ptx_of_cubin[hashlib.sha256(cubin).hexdigest()] = ptx.rstrip("\0")

    def raise_pending(self) -> None:
        """Raise what a callback could not raise through C code."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def _handle(self) -> int:
        self._next += 0x10
        return self._next

    # --- the C functions ---------------------------------------------------------------------------------------
    def load_library(self, library: int, code: int, *_: Any) -> int:
        digest = hashlib.sha256(_cubin_of_fatbin(code)).hexdigest()
        handle = self._handle()
        self.libraries[handle] = _Library(digest)
        _store(library, ctypes.c_size_t, handle)
        return 0

    def get_kernel(self, kernel: int, library: int, name: bytes) -> int:
        handle = self._handle()
        self.kernels[handle] = (self.libraries[library], name.decode())
        _store(kernel, ctypes.c_size_t, handle)
        return 0

    def init_library_once(self, state: int, init: int, load: int, set_error: int) -> int:
        if ctypes.c_size_t.from_address(state).value:
            return 0
        library = ctypes.c_void_p()
        code = ctypes.CFUNCTYPE(_I, _P)(init)(ctypes.addressof(library))
        if not code and load:
            code = ctypes.CFUNCTYPE(_I, _P, _I)(load)(ctypes.addressof(library), 0)
        if code:  # the host code returns to TVM-FFI at once, which needs an error to be set
            ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(set_error)(b"RuntimeError", b"emulator: see the cause")
            return -1
        _store(state, ctypes.c_size_t, library.value or 0)
        return 0

    def launch(self, config: int, function: int, arguments: int) -> int:
        c = ctypes.cast(config, ctypes.POINTER(_LaunchConfig))[0]
        cluster, dependent = (1, 1, 1), False
        for i in range(c.count):
            attribute = c.attributes[i]
            if attribute.id == _ATTRIBUTE_CLUSTER:
                cluster = tuple(attribute.value[:3])
            elif attribute.id == _ATTRIBUTE_PREFERRED_CLUSTER and tuple(attribute.value[:3]) in (cluster, (0, 0, 0)):
                continue
            elif attribute.id == _ATTRIBUTE_PDL:
                dependent = bool(attribute.value[0])
            elif attribute.id not in _IGNORED_ATTRIBUTES:
                raise LaunchError(f"launch attribute {attribute.id} = {list(attribute.value[:4])} is not modelled")
        library, name = self.kernels[function]
        ptx = self.ptx_of_cubin.get(library.digest)
        if ptx is None:
            raise LaunchError(
                f"kernel {name!r}: no PTX is known for the loaded library. It was compiled before capture was installed, "
                "or it came from a compilation cache on disk; disable that cache for emulation"
            )
        pointers = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
        params = {n: ctypes.string_at(pointers[i], size) for i, (n, size) in enumerate(parameter_sizes(ptx, name))}
        launch = Launch(name, ptx, c.grid.tuple(), c.block.tuple(), cluster, c.smem, params, dependent)
        if self.handler is None:
            self.launches.append(launch)
        else:
            self.handler(launch)
        return 0

    def device_attribute(self, value: int, attribute: int, device: int) -> int:
        major, minor = target_capability()
        known = {**_DEVICE_ATTRIBUTES, 75: major, 76: minor}
        if attribute not in known:
            raise LaunchError(f"cudaDeviceGetAttribute({attribute}) is not modelled")
        _store(value, _I, known[attribute])
        return 0

    def _zero_out(self, pointer: int, *_: Any) -> int:
        _store(pointer, _I, 0)
        return 0

    def _device_count(self, pointer: int) -> int:
        _store(pointer, _I, 1)
        return 0

    def _raise_in_host(self, set_raised: int, code: int, *_: Any) -> None:
        parts = (ctypes.c_char_p * 2)(b"the emulator stopped the launch; its own exception follows", b"")
        ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p, _I)(set_raised)(b"RuntimeError", parts, 2)

    def table(self) -> dict[str, tuple[Any, Callable[..., Any]]]:
        """C name → (ctypes prototype, Python function)."""

        def ok(*_: Any) -> int:
            return 0

        entries: dict[str, tuple[tuple[Any, ...], Callable[..., Any]]] = {
            "_cudaLibraryLoadData": ((_I, _P, _P, _P, _P, _U, _P, _P, _U), self.load_library),
            "_cuLibraryLoadData": ((_I, _P, _P, _P, _P, _U, _P, _P, _U), self.load_library),
            "_cudaLibraryUnload": ((_I, _P), ok),
            "_cuLibraryUnload": ((_I, _P), ok),
            "_cudaLibraryGetKernel": ((_I, _P, _P, ctypes.c_char_p), self.get_kernel),
            "_cuLibraryGetKernel": ((_I, _P, _P, ctypes.c_char_p), self.get_kernel),
            "_cudaFuncSetAttribute": ((_I, _P, _I, _I), ok),
            "_cudaKernelSetAttributeForDevice": ((_I, _P, _I, _I, _I), ok),
            "_cuKernelGetAttribute": ((_I, _P, _I, _P, _I), self._zero_out),
            "_cudaDeviceGetAttribute": ((_I, _P, _I, _I), self.device_attribute),
            "_cudaGetDevice": ((_I, _P), self._zero_out),
            "_cuDeviceGet": ((_I, _P, _I), self._zero_out),
            "_cudaGetDeviceCount": ((_I, _P), self._device_count),
            "_cudaSetDevice": ((_I, _I), ok),
            "_cudaStreamSynchronize": ((_I, _P), ok),
            "_cudaDeviceSynchronize": ((_I,), ok),
            "_cudaLaunchKernelEx": ((_I, _P, _P, _P), self.launch),
            "cuda_dialect_assert_success": ((_I, _I), lambda code: code),
            "cuda_dialect_print_on_error": ((_I, _I), lambda code: code),
            "cuda_dialect_init_library_once": ((_I, _P, _P, _P, _P), self.init_library_once),
            "cuda_dialect_unload_library_once": ((None, _P), lambda state: None),
            "CuteDSLRT_TVMFFISetRaisedCudaError": ((None, _P, _I), self._raise_in_host),
            "CuteDSLRT_TVMFFISetRaisedCudaLaunchError": ((None, _P, _I), self._raise_in_host),
        }
        for name in ("CuteDSLRT_GetErrorName", "cuda_dialect_get_error_name"):
            entries[name] = ((_P, _I), lambda code: ctypes.cast(_ERROR_NAME, _P).value)
        for name in _UNMODELLED:
            entries[name] = ((_I,), self._unmodelled(name))
        return {n: (ctypes.CFUNCTYPE(*proto), self._guarded(proto[0], f)) for n, (proto, f) in entries.items()}

    def _unmodelled(self, name: str) -> Callable[..., int]:
        def call() -> int:
            raise LaunchError(f"runtime function {name} is not modelled")

        return call

    def _guarded(self, restype: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """No exception may cross C: keep the first one, return an error code, raise it after the host call."""

        def call(*args: Any) -> Any:
            try:
                return function(*args)
            except BaseException as error:  # re-raised by raise_pending
                self.error = self.error or error
                return None if restype is None else 999  # cudaErrorUnknown

        return call

    def build(self, folder: Path) -> Path:
        """Write the stand-in library into ``folder``, load it, connect its slots; returns its path."""
        table = self.table()
        path = folder / "libcute_dsl_runtime.so"
        write_trampolines(path, list(table))
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        slots = (ctypes.c_void_p * len(table)).in_dll(library, SLOTS)
        for i, (prototype, function) in enumerate(table.values()):
            callback = prototype(function)
            self._callbacks.append(callback)
            slots[i] = ctypes.cast(callback, ctypes.c_void_p).value
        self._callbacks.append(library)
        return path


_ERROR_NAME = ctypes.create_string_buffer(b"cudaErrorUnknown")
_runtime: Runtime | None = None
_folder: tempfile.TemporaryDirectory[str] | None = None


def target_capability() -> tuple[int, int]:
    """Compute capability of the emulated device, from ``CUTE_DSL_ARCH`` (sm_100a → (10, 0))."""
    m = re.fullmatch(r"sm_(\d+)(\d)[af]?", os.environ.get("CUTE_DSL_ARCH", "sm_90a"))
    if m is None:
        raise ValueError(f"CUTE_DSL_ARCH = {os.environ['CUTE_DSL_ARCH']!r}: expected sm_90a, sm_100a or sm_103a")
    return int(m.group(1)), int(m.group(2))


def runtime() -> Runtime:
    """The process's runtime; ``install`` must have been called."""
    if _runtime is None:
        raise LaunchError("launch capture is not installed: call tests.emulator.capture.install(arch) first")
    return _runtime


def install(arch: str) -> Runtime:
    """Put launch capture in place for this process and architecture. Call before anything is compiled.

    Raises:
        LaunchError: capture is already installed for another architecture (the DSL fixes it at import).
    """
    global _runtime, _folder
    if _runtime is not None:
        if os.environ["CUTE_DSL_ARCH"] != arch:
            raise LaunchError(f"arch = {arch!r}: this process already emulates {os.environ['CUTE_DSL_ARCH']!r}")
        return _runtime
    _folder = tempfile.TemporaryDirectory(prefix="emulator-")
    root = Path(_folder.name)
    created = Runtime()
    os.environ.pop("LP_FA4_CACHE_DIR", None)  # a kernel that is loaded comes without its PTX
    os.environ.update(
        CUTE_DSL_ARCH=arch,
        CUTE_DSL_LIBS=str(created.build(root)),
        CUTE_DSL_KEEP="ptx,cubin",
        CUTE_DSL_LINEINFO="1",  # .loc lines: reports name the kernel's source line
        CUTE_DSL_DUMP_DIR=str(root),
        QUACK_CACHE_ENABLED="0",
        QUACK_ARCH=re.sub(r"\D", "", arch),
        FLASH_ATTENTION_ARCH=arch.rstrip("af"),
        FLASH_ATTENTION_NUM_SMS="148" if target_capability_of(arch) >= (10, 0) else "132",
    )
    from cutlass.base_dsl import jit_executor

    from . import locations

    locations.remember()
    read = jit_executor.JitFunctionArtifacts.__post_init__

    def read_and_record(self: Any) -> None:
        read(self)
        created.record_artifacts(self.PTX, self.CUBIN)

    jit_executor.JitFunctionArtifacts.__post_init__ = read_and_record
    _runtime = created
    return created


def leave() -> NoReturn:
    """End this process at once: taking compiled kernels apart one by one costs ten seconds and more."""
    if _folder is not None:
        _folder.cleanup()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def target_capability_of(arch: str) -> tuple[int, int]:
    """(10, 0) for ``sm_100a``."""
    digits = re.sub(r"\D", "", arch)
    return int(digits[:-1]), int(digits[-1])


# --- host tensors that claim to be on a CUDA device --------------------------------------------------------------
class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]
_no_delete = _Deleter(lambda _: None)
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_CUDA = 2
# torch dtype name → DLPack (type code, bits, lanes)
_DLPACK = {
    "float32": (2, 32, 1),
    "float16": (2, 16, 1),
    "bfloat16": (4, 16, 1),
    "float64": (2, 64, 1),
    "int32": (0, 32, 1),
    "int64": (0, 64, 1),
    "int8": (0, 8, 1),
    "uint8": (1, 8, 1),
    "bool": (6, 8, 1),
    "float8_e4m3fn": (10, 8, 1),
    "float8_e5m2": (12, 8, 1),
    "float8_e8m0fnu": (14, 8, 1),
    "float4_e2m1fn_x2": (17, 4, 2),
}


class _Exporter:
    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CUDA, 0)


class DeviceMemory:
    """The tensors handed to kernels: keeps them alive while a call runs and knows their extents (bytes)."""

    def __init__(self) -> None:
        self._alive: list[Any] = []
        #: DLPack headers, never freed (some 200 bytes each): a consumer may call the deleter long after the call
        self._headers: list[Any] = []
        self.extents: list[tuple[int, int]] = []

    def clear(self) -> None:
        self._alive.clear()
        self.extents.clear()

    def as_device(self, tensor: Any) -> Any:
        """torch CPU tensor → ``tvm_ffi.Tensor`` on ``cuda:0`` that shares its storage."""
        import tvm_ffi

        name = str(tensor.dtype).removeprefix("torch.")
        if name not in _DLPACK:
            raise LaunchError(f"tensor dtype {tensor.dtype} has no DLPack code here; known: {sorted(_DLPACK)}")
        code, bits, lanes = _DLPACK[name]
        managed = _Managed()
        n = max(1, tensor.dim())
        shape, strides = (ctypes.c_int64 * n)(*tensor.shape), (ctypes.c_int64 * n)(*tensor.stride())
        managed.tensor = _DLTensor(tensor.data_ptr(), _CUDA, 0, tensor.dim(), code, bits, lanes, shape, strides, 0)
        managed.deleter = _no_delete
        self.register(tensor)
        self._headers.append((managed, shape, strides))
        self._alive.append(tensor)
        return tvm_ffi.from_dlpack(_Exporter(_capsule(ctypes.addressof(managed), b"dltensor", None)))

    def register(self, tensor: Any) -> None:
        """Make the extent of ``tensor`` (first to last element of the view) readable and writable by kernels."""
        if tensor.numel() == 0:
            return
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.extents.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))


device_memory = DeviceMemory()
