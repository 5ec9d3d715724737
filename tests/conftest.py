"""The one place where tests are skipped for what a machine lacks, and where the versions under test are checked."""

from __future__ import annotations

import importlib.util
import os
import signal
from importlib.metadata import version

import pytest
import torch


def pytest_configure() -> None:
    """Undo what nohup and shells do to jobs in the background: signals stay ignored, and children inherit that."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, saying why, the tests that need a GPU or vLLM where there is none."""
    has_gpu = torch.cuda.is_available()
    has_vllm = importlib.util.find_spec("vllm") is not None
    if not has_vllm and os.environ.get("HUMMING_EXPECT_VLLM"):
        raise pytest.UsageError("HUMMING_EXPECT_VLLM is set, but vllm cannot be imported")
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("vllm") and not has_vllm:
            item.add_marker(pytest.mark.skip(reason="vLLM's Python files are not installed"))


def pytest_report_header() -> str:
    """Name the Humming that is tested; a run that was meant for another version stops."""
    found = version("humming-kernels")
    expected = os.environ.get("HUMMING_EXPECTED", found)
    if found != expected:
        raise pytest.UsageError(f"expected humming-kernels {expected}, found {found}")
    return f"humming-kernels {found}, torch {torch.__version__}"
