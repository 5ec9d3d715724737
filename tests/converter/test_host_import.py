"""Importing Humming through the host: no compiler is imported for it, and its mark on the function stays."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import torch
original = torch.compiler.assume_constant_result
from humming_convert.host.target import humming
humming()
assert "torch._dynamo" not in sys.modules
assert torch.compiler.assume_constant_result is original
import humming.ops.gemm as gemm
marked = gemm._get_humming_gemm_output_meta
assert marked._dynamo_marked_constant is True
theirs = torch.compiler.assume_constant_result(lambda: None)
assert vars(theirs) == vars(marked) | {"_dynamo_marked_constant": True}, (vars(theirs), vars(marked))
"""


def test_humming_is_imported_without_torchs_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
