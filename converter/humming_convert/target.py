"""What the packed bytes are made for: the GPU architecture and the CUDA compiler that Humming will use there."""

from __future__ import annotations

import re
from dataclasses import dataclass

from humming_convert.errors import Problem, UnsupportedError

SUPPORTED_SMS: tuple[int, ...] = (75, 80, 86, 89, 90, 100, 103, 110, 120, 121)
DEFAULT_CUDA: tuple[int, int] = (13, 0)

SM_NAMES: dict[int, str] = {
    75: "Turing (T4, RTX 20)",
    80: "Ampere (A100)",
    86: "Ampere (A10, A40, RTX 30)",
    89: "Ada (L4, L40S, RTX 40)",
    90: "Hopper (H100, H200, H20)",
    100: "Blackwell (B200, GB200)",
    103: "Blackwell Ultra (B300, GB300)",
    110: "Blackwell (Jetson Thor)",
    120: "Blackwell (RTX PRO 6000, RTX 50)",
    121: "Blackwell (GB10, DGX Spark)",
}


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU architecture (`sm`, e.g. 90) and the CUDA compiler version there, both of which enter the layout.

    `is_ppu` marks the non-NVIDIA PPU, whose row order differs.
    """

    sm: int
    cuda: tuple[int, int] = DEFAULT_CUDA
    is_ppu: bool = False

    def __post_init__(self) -> None:
        if self.sm not in SUPPORTED_SMS:
            known = ", ".join(f"sm{sm}" for sm in SUPPORTED_SMS)
            raise UnsupportedError([Problem("target", f"one of {known}", f"sm{self.sm}")])

    def __str__(self) -> str:
        return f"sm{self.sm}"


def parse_sm(text: str) -> int:
    """`sm90`, `sm_90`, `sm_90a`, `90` or `9.0` as the number 90. Raises UnsupportedError for anything else."""
    match = re.fullmatch(r"(?:sm_?)?(\d{2,3}|\d{1,2}\.\d)[af]?", text.strip().lower())
    if match is None:
        raise UnsupportedError([Problem("--target", "sm80, sm90, sm100, ...", repr(text))])
    return int(match[1].replace(".", ""))


def parse_cuda(text: str) -> tuple[int, int]:
    """`13.0` as (13, 0). Raises UnsupportedError for anything else."""
    match = re.fullmatch(r"(\d{1,2})\.(\d{1,2})(?:\.\d+)?", text.strip())
    if match is None:
        raise UnsupportedError([Problem("--cuda", "a version such as 13.0", repr(text))])
    return int(match[1]), int(match[2])
