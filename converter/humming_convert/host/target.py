"""Run Humming's own conversion code for a GPU that need not be there.

Humming asks its current device about every layout question and hands the weights to operators that exist as
CUDA kernels. `emulate` puts a stand-in at each of these seams and takes them all away after the last use. The
seams are shared by all threads; what they answer is looked up per thread, so threads may convert for
different targets.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from humming_convert.errors import Problem, UnsupportedError
from humming_convert.host import cpu, scales, shadow
from humming_convert.host.foreign import Foreign
from humming_convert.target import Target

_MODULES = (
    "config",
    "config.config",
    "device",
    "dtypes",
    "ops",
    "schema",
    "schema.awq",
    "schema.compressed_tensors",
    "transform",
    "utils.device",
)


@dataclass(frozen=True, slots=True)
class Emulation:
    """What this thread converts for, whether its tensors are on a real GPU of that architecture, and what else is
    known about the GPU."""

    target: Target
    on_gpu: bool
    facts: Mapping[str, Foreign] = field(default_factory=dict)


_active: ContextVar[Emulation | None] = ContextVar("humming_convert_emulation", default=None)
_lock = threading.Lock()
_depth = 0
_undo: list[Callable[[], None]] = []


@functools.cache
def humming() -> SimpleNamespace:
    """Humming's modules that convert. Raises ImportError when humming-kernels is not installed."""
    return import_humming(_MODULES)


def import_humming(names: Sequence[str]) -> SimpleNamespace:
    """Modules of Humming, a.b as attribute a_b, imported without the compile job that its import starts in the
    background.

    Raises ImportError when humming-kernels is not installed.
    """
    name = "HUMMING_DISABLE_PARALLEL_BUILD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        with _without_importing_dynamo():
            modules = {module.replace(".", "_"): importlib.import_module(f"humming.{module}") for module in names}
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    return SimpleNamespace(**modules)


@contextlib.contextmanager
def _without_importing_dynamo() -> Iterator[None]:
    """Let `torch.compiler.assume_constant_result` mark functions without importing torch's compiler for it.

    Humming uses that decorator once, while it is imported. It does nothing but set this attribute, and importing the
    compiler to do so takes two seconds of every start.
    """
    original = torch.compiler.assume_constant_result

    def mark(function: Foreign) -> Foreign:
        function._dynamo_marked_constant = True
        return function

    if "torch._dynamo" not in sys.modules:
        torch.compiler.assume_constant_result = mark
    try:
        yield
    finally:
        torch.compiler.assume_constant_result = original


@contextlib.contextmanager
def emulate(
    target: Target, device: torch.device | None = None, facts: Mapping[str, Foreign] | None = None
) -> Iterator[None]:
    """Let Humming see `target` in this thread while the block runs; may be nested and used from several
    threads. `facts` are further properties of the GPU, by Humming's names.

    `device` is where the tensors are (default: a CPU). On a CUDA device Humming's own kernels run, so its
    architecture must be the target's. Raises UnsupportedError when it is not.
    """
    on_gpu = device is not None and device.type == "cuda"
    if on_gpu:
        _check_gpu(target, device)
    _install()
    token = _active.set(Emulation(target, on_gpu, facts or {}))
    try:
        with torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
            yield
    finally:
        _active.reset(token)
        _remove()


def _check_gpu(target: Target, device: torch.device | None) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    if major * 10 + minor != target.sm:
        hint = "Humming's kernels run only there: use --device cpu, which converts for any target"
        raise UnsupportedError([Problem("device", f"a GPU of {target}", f"sm{major * 10 + minor}", hint)])


class _StandIn:
    """What `humming.device.current_device` holds: the target's answers, or the real device's outside an
    emulation."""

    def __init__(self, real: object | None) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Foreign:
        emulation = _active.get()
        if emulation is None or emulation.on_gpu:
            if self._real is None:
                self._real = humming().utils_device._get_device_info_extension()._DeviceInfo(-1)
            return getattr(self._real, name)
        target = emulation.target
        answers: dict[str, Foreign] = {
            "index": -1,
            "name": f"{target} (stand-in)",
            "is_ppu": target.is_ppu,
            "sm_version": target.sm,
            "sm_major": target.sm // 10,
            "sm_minor": target.sm % 10,
            **emulation.facts,
        }
        if name not in answers:
            raise AttributeError(f"a stand-in for {target} cannot say its {name}")
        return answers[name]


def _is_emulating() -> bool:
    emulation = _active.get()
    return emulation is not None and not emulation.on_gpu


def _device_info(original: Foreign, stand_in: _StandIn) -> Callable[..., Foreign]:
    def device_info(index: Foreign = None) -> Foreign:
        return stand_in if _is_emulating() else original(index)

    return device_info


def _compiler_version(original: Callable[..., Foreign]) -> Callable[..., Foreign]:
    def compiler_version(compiler: Foreign) -> Foreign:
        emulation = _active.get()
        return original(compiler) if emulation is None else emulation.target.cuda

    return compiler_version


def _cuda_device(original: type) -> type:
    """A class, because torch itself asks whether an argument is an instance of `torch.cuda.device`."""

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    class device(original, metaclass=Meta):  # type: ignore[misc]  # noqa: N801 - torch's name
        def __new__(cls, *_: Foreign) -> Foreign:
            return contextlib.nullcontext() if _is_emulating() else super().__new__(cls)

    return device


def _tensor_cuda(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def cuda(self: torch.Tensor, *args: Foreign, **kwargs: Foreign) -> torch.Tensor:
        # A meta tensor stands in for the weight while a layout is decided; there is nothing to move, on a GPU either.
        is_stand_in = self.is_meta and _active.get() is not None
        return self if is_stand_in or _is_emulating() else original(self, *args, **kwargs)

    return cuda


def _seams() -> Iterator[tuple[Foreign, str, Foreign]]:
    """(owner, attribute, replacement) of everything that is replaced while an emulation runs."""
    modules = humming()
    current = modules.device.current_device
    stand_in = _StandIn(current._value)
    yield current, "_value", stand_in
    yield modules.transform, "DeviceInfo", _device_info(modules.transform.DeviceInfo, stand_in)
    version = modules.config_config._cuda_compiler_version
    yield modules.config_config, "_cuda_compiler_version", _compiler_version(version)
    yield torch.cuda, "device", _cuda_device(torch.cuda.device)
    yield torch.Tensor, "cuda", _tensor_cuda(torch.Tensor.cuda)
    for name in cpu.NAMES:
        original = getattr(modules.ops, name, None)
        if original is not None:
            yield modules.ops, name, cpu.by_device(getattr(cpu, name), original)
    for name in cpu.MISSING:
        yield modules.ops, name, cpu.missing(name, getattr(modules.ops, name))
    yield from shadow.seams(modules)
    yield from scales.seams(modules)


def _replace(owner: Foreign, name: str, replacement: Foreign) -> None:
    original = getattr(owner, name)
    is_inherited = isinstance(owner, type) and name not in vars(owner)
    setattr(owner, name, replacement)
    _undo.append(
        functools.partial(delattr, owner, name)
        if is_inherited
        else functools.partial(setattr, owner, name, original)
    )


def _install() -> None:
    global _depth
    with _lock:
        if _depth == 0:
            try:
                for owner, name, replacement in _seams():
                    _replace(owner, name, replacement)
            except BaseException:
                _restore()
                raise
        _depth += 1


def _remove() -> None:
    global _depth
    with _lock:
        _depth -= 1
        if _depth == 0:
            _restore()


def _restore() -> None:
    while _undo:
        _undo.pop()()
