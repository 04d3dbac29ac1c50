"""Loops that numba compiles once a machine, and that run without numba ever after.

Importing numba and calling a function that it has cached costs 0.6 s of CPU and 135 MB, as much
time as quantizing 3 GB. So the machine code is kept: all loops in one object file, which llvmlite
alone loads, in 0.06 s and 55 MB. Refused: numba's own cache, which numba has to be imported to
read, and an extension module, which needs a C compiler here or a wheel for every platform.

numba's callbacks (`numba.cfunc`) give the LLVM of a function that takes plain pointers and numbers;
what surrounds it to report exceptions to Python is dropped, the loops raise none.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite  # type: ignore[import-untyped]
import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

Loop = Callable[..., None]

_HERE = Path(__file__).parent
_SOURCES = (Path(__file__), _HERE / "formats.py", *sorted((_HERE / "loops").glob("*.py")))

_lock = threading.Lock()
_loops: dict[str, Loop] = {}
_keep: list[object] = []  # the engine that owns the machine code


def loop(name: str) -> Loop:
    """The compiled loop of that name in `loops.LOOPS`. It does not hold the GIL.

    Called with numpy arrays, contiguous and of the very dtype, where the loop takes pointers, and
    with numbers. The first call on a machine compiles all loops, which takes seconds.
    """
    if not _loops:
        with _lock:
            if not _loops:
                _loops.update(_load())
    return _loops[name]


def _load() -> dict[str, Loop]:
    try:
        return _link()
    except (LookupError, RuntimeError, ValueError):
        # Taking numba's output apart leans on how it is made. Where a version or a platform makes
        # it otherwise, numba's own callbacks do the same, after numba is imported and has compiled.
        return {
            name: _callable(callback.address, signature.split(), native=False)
            for name, (callback, signature) in _make_callbacks().items()
        }


def _link() -> dict[str, Loop]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = _target_machine()
    file_name = f"loops-{_fingerprint(machine)}.bin"
    content = _read(file_name)
    if content is None:
        content = _compile(machine)
        _write(file_name, content)
    header, _, code = content.partition(b"\n")
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _keep.append(engine)
    signatures: dict[str, str] = json.loads(header)["loops"]
    return {
        name: _callable(engine.get_function_address(_symbol(name)), signature.split())
        for name, signature in signatures.items()
    }


def _target_machine() -> Any:
    """This very processor, with everything it can do; LLVM set up as numba does it."""
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=_processor_features(),
        opt=3,
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )


def _processor_features() -> str:
    try:
        return str(llvm.get_host_cpu_features().flatten())
    except RuntimeError:  # LLVM cannot tell on this platform; the processor's name has to do
        return ""


def _symbol(name: str) -> str:
    return f"quantkit_{name}"


# Calling


class _Pointer:
    """What ctypes asks to turn a numpy array into the address of its data."""

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype(dtype)

    def from_param(self, array: NDArray[Any]) -> ctypes.c_void_p:
        if array.dtype != self.dtype or not array.flags.c_contiguous:
            raise AssertionError(f"a loop takes contiguous {self.dtype}, got {array.dtype}")
        return ctypes.c_void_p(array.ctypes.data)


_NUMBERS = {"int64": ctypes.c_int64, "float32": ctypes.c_float}
# numba's functions return a status and take, before their own arguments, where to put the result
# and the exception. A loop has neither; all calls share one place that nobody reads.
_NOWHERE = (ctypes.c_void_p * 2)()


def _callable(address: int, kinds: list[str], *, native: bool = True) -> Loop:
    """native: as numba's functions are called; else as its callbacks for C are."""
    # ctypes wants a `from_param` and not a type of its own.
    own: list[Any] = [
        _Pointer(kind[:-1]) if kind.endswith("*") else _NUMBERS[kind] for kind in kinds
    ]
    if not native:
        plain = ctypes.CFUNCTYPE(None)(address)
        plain.argtypes = tuple(own)
        return plain
    function = ctypes.CFUNCTYPE(ctypes.c_int32)(address)
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, *own)
    nowhere = ctypes.addressof(_NOWHERE)

    def call(*arguments: Any) -> None:
        if function(nowhere, nowhere, *arguments):
            raise AssertionError("a compiled loop raised an exception")

    return call


# Compiling

_DEFINITION = re.compile(r'^define [^\n]*?@("?)([\w.$]+)\1\(.*?^}\n', re.MULTILINE | re.DOTALL)
_REFERENCE = re.compile(r'@"?([\w.$]+)')


def _compile(machine: Any) -> bytes:
    """All loops as one object file, behind a line of JSON with their signatures."""
    whole = None
    callbacks = _make_callbacks()
    for name, (callback, _) in callbacks.items():
        module = _extract(callback.inspect_llvm(), _symbol(name))
        if whole is None:
            whole = module
        else:
            whole.link_in(module)
    assert whole is not None
    header = {"loops": {name: signature for name, (_, signature) in callbacks.items()}}
    return json.dumps(header).encode() + b"\n" + bytes(machine.emit_object(whole))


def _make_callbacks() -> dict[str, tuple[Any, str]]:
    """Name of a loop -> (numba's callback, compiled; the signature of the loop)."""
    import numba

    from quantkit.numerics.loops import LOOPS

    callbacks = {}
    for name, (function, signature) in LOOPS.items():
        arguments = ", ".join(
            f"CPointer({kind[:-1]})" if kind.endswith("*") else kind for kind in signature.split()
        )
        compiled = numba.cfunc(f"void({arguments})", nopython=True, error_model="numpy")(function)
        callbacks[name] = compiled, signature
        _keep.append(compiled)
    return callbacks


def _extract(assembly: str, symbol: str) -> Any:
    """The module of a callback with numba's native function, under a name of ours, and its callees.

    numba calls the callback itself by the name of the native function with "cfunc." before it.
    """
    definitions = {found[2]: found[0] for found in _DEFINITION.finditer(assembly)}
    (callback,) = (name for name in definitions if name.startswith("cfunc."))
    native = callback.removeprefix("cfunc.")
    needed, found = set[str](), {native}
    while found:
        needed |= found
        called = {name for caller in found for name in _REFERENCE.findall(definitions[caller])}
        found = (called & definitions.keys()) - needed
    module = llvm.parse_assembly(
        _DEFINITION.sub(lambda each: each[0] if each[2] in needed else "", assembly)
    )
    module.get_function(native).name = symbol
    return module


# Keeping


def _fingerprint(machine: Any) -> str:
    """Of all that the machine code depends on: the sources, the compiler, the processor."""
    digest = hashlib.sha256()
    for source in _SOURCES:
        digest.update(source.read_bytes())
    compiler = (llvmlite.__version__, *map(str, llvm.llvm_version_info))
    processor = machine.triple, llvm.get_host_cpu_name(), _processor_features()
    digest.update("\0".join((*compiler, *processor)).encode())
    return digest.hexdigest()[:20]


def _folders() -> Iterator[Path]:
    """Where machine code may be kept, best first: as numba does it, and the same variable."""
    if asked := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(asked)
        return
    yield _HERE / "__pycache__"
    yield Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "quantkit"


def _read(file_name: str) -> bytes | None:
    """What was kept; None when nothing was, or when it is not whole."""
    for folder in _folders():
        try:
            content = (folder / file_name).read_bytes()
        except OSError:
            continue
        digest, _, rest = content.partition(b"\n")
        if hashlib.sha256(rest).hexdigest().encode() == digest:
            return rest
    return None


def _write(file_name: str, content: bytes) -> None:
    """Keep it in the first folder that can be written to; without one, every process compiles."""
    whole = hashlib.sha256(content).hexdigest().encode() + b"\n" + content
    for folder in _folders():
        unfinished = folder / f"{file_name}.{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(whole)
            unfinished.replace(folder / file_name)
            return
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
