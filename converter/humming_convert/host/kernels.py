"""What Humming would compile for a layer on a GPU that need not be there, and the compiling itself.

Humming's own classes choose and write each kernel; here they hand it over instead of compiling and loading it. Each
kernel is then compiled by Humming's own compiler, in a cache of its own that is thrown away.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from humming_convert.errors import Problem, UnsupportedError
from humming_convert.host.foreign import Foreign
from humming_convert.host.target import emulate, humming, import_humming
from humming_convert.target import Target
from humming_loader.errors import KernelError
from humming_loader.kernel_entries import Identity
from humming_loader.toolchain import Toolchain

_MODULES = (
    "config",
    "device",
    "jit.compiler",
    "jit.runtime",
    "kernel.humming",
    "kernel.process_input",
    "tune",
    "tune.process_input",
    "utils.jit",
    "utils.nvrtc",
)
_lock = threading.Lock()

EXTRA = "pip install 'humming-convert[kernels]'"


@dataclass(frozen=True, slots=True)
class Request:
    """One kernel that Humming would compile: `kind` is `gemm` or `process_input`."""

    kind: str
    source: str
    expression: str
    arch: str
    disable_fast_math: bool
    postprocess: Callable[[str], None]


@functools.cache
def modules() -> SimpleNamespace:
    """Humming's modules that make kernels. Raises UnsupportedError where what they import is not installed."""
    humming()
    try:
        return import_humming(_MODULES)
    except ImportError as error:
        raise UnsupportedError([Problem("kernels", "Humming's compiler", str(error), EXTRA)]) from error


class KernelHost:
    """Humming on a stand-in GPU: `target` with `facts` (its properties by Humming's names, all that tuning asks for).

    As a context manager it holds the seams; one at a time in a process.
    """

    def __init__(self, target: Target, facts: Mapping[str, Foreign]) -> None:
        self.target = target
        self._facts = facts
        self._requests: dict[tuple[str, str], Request] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> KernelHost:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_lock)
            stack.enter_context(emulate(self.target, facts=self._facts))
            for owner, name, value in self._seams():
                stack.enter_context(_replaced(owner, name, value))
            stack.callback(_forget_choices)
            _forget_choices()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _seams(self) -> Iterator[tuple[Foreign, str, Foreign]]:
        found = modules()
        device = found.device.DeviceInfo
        stand_in = object.__new__(device)
        stand_in._index, stand_in._value = 0, found.device.current_device._value
        gemm, process_input = found.kernel_humming.HummingKernel, found.kernel_process_input.ProcessInputKernel
        yield device, "_instances", {0: stand_in}
        yield found.jit_runtime.KernelRuntime, "_instances", {}
        yield found.jit_runtime.KernelRuntime, "prepare", self._recorder()
        yield found.jit_runtime.KernelRuntime, "compile_many", staticmethod(_one_by_one)
        yield found.kernel_humming, "_cuda_compiler_version", lambda _: self.target.cuda
        yield gemm, "_str2kernel_cache", {}
        yield gemm, "_id2kernel", {}
        yield process_input, "_str2kernel_cache", {}
        for kind in (gemm, process_input):
            yield kind, "register_kernel", _without_loading
        yield torch.cuda, "current_device", lambda: 0
        yield torch.version, "cuda", ".".join(str(number) for number in self.target.cuda)

    def _recorder(self) -> Callable[[Foreign], None]:
        gemm = modules().kernel_humming.HummingKernel

        def prepare(kernel: Foreign) -> None:
            request = Request(
                kind="gemm" if isinstance(kernel, gemm) else "process_input",
                source=kernel.code,
                expression=kernel.kernel_expr,
                arch=kernel.sm_version_str,
                disable_fast_math=kernel.disable_fast_math,
                postprocess=kernel.postprocess_cubin,
            )
            self._requests.setdefault((request.source, request.expression), request)

        return prepare

    # --- what is asked for
    # ---------------------------------------------------------------------------------------------------

    def requests(self) -> list[Request]:
        """Everything that was asked for so far, each kernel once."""
        return list(self._requests.values())

    def ask_gemm(self, layer_config: str, gemm_type: str) -> None:
        """All kernels of one sublayer's weights, for every number of rows. Raises UnsupportedError."""
        compute = {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": gemm_type}
        with self._explained(f"{gemm_type} gemm"):
            modules().kernel_humming.HummingKernel.prepare_kernels(layer_config, json.dumps(compute), None, 0)

    def ask_process_input(self, problem: Mapping[str, Foreign], layer_config: Foreign) -> None:
        """All kernels that prepare one sublayer's input, by the fields of Humming's ProcessInputProblemConfig.

        Raises UnsupportedError.
        """
        found = modules()
        with self._explained("input processing"):
            config = found.config.ProcessInputProblemConfig(**problem)
            for use_pdl in self._uses_pdl(layer_config):
                intervals = found.tune_process_input.get_process_input_tuning_intervals(config, use_pdl)
                found.kernel_process_input.ProcessInputKernel.prepare_kernels(config, intervals, 0)

    @staticmethod
    def _uses_pdl(layer_config: Foreign) -> set[bool]:
        heuristics = modules().tune.get_heuristics_class(0)
        rows = (*range(1, 257), *(1 << power for power in range(9, 21)))
        return {bool(heuristics.should_use_pdl_for_input(layer_config, count)) for count in rows}

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Humming refuses by assertion and without words: say what was asked for."""
        try:
            yield
        except (AssertionError, AttributeError, KeyError, RuntimeError, ValueError) as error:
            found = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise UnsupportedError([Problem(what, f"kernels of Humming for {self.target}", found)]) from error

    # --- compiling
    # ---------------------------------------------------------------------------------------------------

    def toolchain(self) -> Toolchain:
        """The compiler on this machine. Raises UnsupportedError where there is none, or one of another version."""
        try:
            found = Toolchain()
        except KernelError as error:
            raise UnsupportedError([Problem("kernels", "NVRTC and CUDA's headers", str(error), EXTRA)]) from error
        if found.version != self.target.cuda:
            wanted, have = (".".join(str(number) for number in pair) for pair in (self.target.cuda, found.version))
            hint = f"pip install 'cuda-toolkit[cccl,crt,cudart,nvrtc]=={wanted}.*'"
            raise UnsupportedError([Problem("kernels", f"NVRTC {wanted}, as the target says", have, hint)])
        return found

    def compile(
        self, requests: Sequence[Request], workers: int, toolchain: Toolchain
    ) -> Iterator[tuple[Request, Identity, bytes]]:
        """Each request with what determines it and its cubin, in the order of `requests`; `workers` at once.

        Raises UnsupportedError with the compiler's own words when one does not compile.
        """
        with (
            tempfile.TemporaryDirectory(prefix="humming-kernels-") as folder,
            _private_cache(Path(folder)),
            _builtins_beside(Path(modules().utils_nvrtc.get_nvrtc_library_path())),
        ):
            pool = ThreadPoolExecutor(workers, thread_name_prefix="nvrtc")
            try:
                jobs = [
                    pool.submit(contextvars.copy_context().run, _compile, request, toolchain) for request in requests
                ]
                for request, job in zip(requests, jobs, strict=True):
                    yield request, *job.result()
            finally:
                pool.shutdown(cancel_futures=True)


def _compile(request: Request, toolchain: Toolchain) -> tuple[Identity, bytes]:
    identity = toolchain.identity(request.source, request.expression, request.arch, request.disable_fast_math)
    try:
        path = toolchain.compiler.compile(
            request.source,
            sm_version=request.arch,
            kernel_expr=request.expression,
            disable_fast_math=request.disable_fast_math,
            postprocess_cubin=request.postprocess,
        )
    except RuntimeError as error:
        raise UnsupportedError([Problem("kernels", "a kernel that compiles", str(error)[-2000:])]) from error
    return identity, Path(path).read_bytes()


def _one_by_one(kernel_specs: Iterator[tuple[Foreign, dict[str, Foreign]]], device: Foreign = None) -> list[Foreign]:
    """Humming's threads would not see what this one emulates."""
    return [kind(**arguments) for kind, arguments in kernel_specs]


def _without_loading(kernel: Foreign) -> None:
    kernel.kernel_id, kernel.kernel_name = 0, ""


@contextlib.contextmanager
def _replaced(owner: Foreign, name: str, value: Foreign) -> Iterator[None]:
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if had else delattr(owner, name)


def _forget_choices() -> None:
    """Humming remembers what it chose by layer and device number: here device 0 is a new one each time."""
    for name, module in list(sys.modules.items()):
        if name.startswith("humming.tune"):
            for holder in (module, *(value for value in vars(module).values() if isinstance(value, type))):
                for value in list(vars(holder).values()):
                    clear = getattr(getattr(value, "__func__", value), "cache_clear", None)
                    if clear is not None:
                        clear()


@contextlib.contextmanager
def _private_cache(folder: Path) -> Iterator[None]:
    """Humming's cache and lock files below `folder`."""
    jit, nvrtc = modules().utils_jit, modules().utils_nvrtc
    (folder / "lock").mkdir()
    with (
        _replaced(jit, "get_humming_cache_dir", lambda: str(folder / "cache")),
        _replaced(jit, "get_humming_lock_dir", lambda: str(folder / "lock")),
        _replaced(nvrtc, "_cached_binary_path", None),
    ):
        jit.get_humming_lock_filename.cache_clear()
        try:
            yield
        finally:
            jit.get_humming_lock_filename.cache_clear()


@contextlib.contextmanager
def _builtins_beside(library: Path) -> Iterator[None]:
    """NVRTC looks for its second library by name alone; the wheel's folder is on no search path."""
    name = "LD_LIBRARY_PATH"
    before = os.environ.get(name)
    os.environ[name] = os.pathsep.join(filter(None, (str(library.resolve().parent), before)))
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
