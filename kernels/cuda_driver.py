"""Load compiled kernels and launch them on a tensor's device and torch's current stream."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from .errors import KernelUnavailable
from .nvrtc import Source, cubin, install_sentence

_lock = threading.Lock()
_thread = threading.local()
_modules: dict[tuple[Source, int], object] = {}
_functions: dict[tuple[Kernel, int], object] = {}
_shared_limits: dict[tuple[Source, str, int], int] = {}


class Kernel(NamedTuple):
    """One kernel of a source file.

    Attributes:
        source: the file and how it is compiled.
        name: the kernel, declared extern "C".
        shared_bytes: dynamic shared memory of a launch.
    """

    source: Source
    name: str
    shared_bytes: int = 0


class Launch(NamedTuple):
    """One launch of a kernel.

    Attributes:
        kernel: what runs.
        grid: blocks in x, y and z.
        threads: of a block.
        arguments: ctypes values; structures and arrays are passed by value.
        joins: whether it may begin while the launch before it ends (programmatic dependent launch). The kernel itself
            then has to wait for that one, by ``griddepcontrol.wait``, before it touches memory.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    threads: int
    arguments: list
    joins: bool = False


def launch(kernel: Kernel, device, grid: tuple[int, int, int], threads: int, arguments: list) -> None:
    """``launch_all`` of one launch."""
    launch_all(device, [Launch(kernel, grid, threads, arguments)])


def launch_all(device, launches: Sequence[Launch]) -> None:
    """Launch one after the other on ``device`` (a torch.device) and on torch's current stream of that device.

    The first launch on a device compiles or reads the cache, so it has to come before a CUDA graph is captured. Later
    ones allocate nothing and wait for nothing.
    """
    import torch

    with torch.cuda.device(device):
        device_index = torch.cuda.current_device()
        functions = [_function(launch.kernel, device_index) for launch in launches]
        _bind_context(device_index)
        bindings, stream = driver(), torch.cuda.current_stream().cuda_stream
        config = _config(bindings, stream)
        for function, (kernel, grid, threads, arguments, joins) in zip(functions, launches, strict=True):
            addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.blockDimX, config.sharedMemBytes, config.numAttrs = threads, kernel.shared_bytes, int(joins)
            check(bindings.cuLaunchKernelEx(config, function, ctypes.addressof(addresses), 0))


def check(result):
    """Unpack what a driver call returned.

    Raises:
        torch.cuda.OutOfMemoryError: the driver has no memory left.
        RuntimeError: the call failed in another way; both name the driver's error.
    """
    error, *values = result
    if int(error):
        raise _failure(int(error))
    return values[0] if len(values) == 1 else values


def driver():
    """NVIDIA's ``cuda.bindings.driver``; KernelUnavailable with the install line where it is missing."""
    try:
        from cuda.bindings import driver as module
    except ImportError as error:
        raise KernelUnavailable(install_sentence()) from error
    return module


def _failure(code: int) -> Exception:
    import torch

    results = driver().CUresult
    try:
        name = results(code).name
    except ValueError:  # of a driver newer than the bindings
        name = f"error {code}"
    kind = torch.cuda.OutOfMemoryError if code == results.CUDA_ERROR_OUT_OF_MEMORY else RuntimeError
    return kind(f"CUDA driver call failed: {name}")


def _config(bindings, stream: int):
    """Settings of the launches on a stream but for their sizes; with ``numAttrs`` 1 a launch joins the one before."""
    config = bindings.CUlaunchConfig()
    config.hStream, config.blockDimY, config.blockDimZ = stream, 1, 1
    config.attrs = [_programmatic_launch()]
    return config


@lru_cache(maxsize=1)
def _programmatic_launch():
    bindings = driver()
    attribute = bindings.CUlaunchAttribute()
    attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _bind_context(device_index: int) -> None:
    """Make the device's context current in a thread whose torch calls were all served without the CUDA runtime."""
    if device_index in _thread.__dict__.setdefault("bound", set()):
        return
    bindings = driver()
    if not int(check(bindings.cuCtxGetCurrent())):
        device = check(bindings.cuDeviceGet(device_index))
        check(bindings.cuCtxSetCurrent(check(bindings.cuDevicePrimaryCtxRetain(device))))
    _thread.bound.add(device_index)


def _function(kernel: Kernel, device_index: int):
    """The kernel's handle in the device's context, loaded once."""
    key = (kernel, device_index)
    function = _functions.get(key)
    if function is None:
        with _lock:
            function = _functions.get(key)
            if function is None:
                function = _functions[key] = _load(kernel, device_index)
    return function


def _load(kernel: Kernel, device_index: int):
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise KernelUnavailable(f"{kernel.name} must run once before a CUDA graph is captured")
    key = (kernel.source, device_index)
    code = None if key in _modules else cubin(kernel.source)
    bindings = driver()
    _bind_context(device_index)
    if code is not None:
        _modules[key] = check(bindings.cuModuleLoadData(code))
    function = check(bindings.cuModuleGetFunction(_modules[key], kernel.name.encode()))
    # One function serves launches of several sizes: its limit may only grow.
    limit_key = (kernel.source, kernel.name, device_index)
    if kernel.shared_bytes > _shared_limits.get(limit_key, 0):
        attribute = bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(bindings.cuFuncSetAttribute(function, attribute, kernel.shared_bytes))
        _shared_limits[limit_key] = kernel.shared_bytes
    return function
