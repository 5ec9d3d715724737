"""Copy a file through a GPU: read, to the device, back, write. What a conversion on that GPU cannot outrun.

    python scripts/copy_through_gpu.py SRC DST [--threads N]

Slices of 32 MB in pinned memory, each thread with a stream of its own, written past the page cache as the converter's.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from humming_convert.files import TempFile
from humming_convert.options import default_workers

SLICE_BYTES = 32 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--threads", type=int, default=default_workers())
    given = parser.parse_args()
    source = os.open(given.source, os.O_RDONLY)
    size = os.fstat(source).st_size
    written = TempFile(given.target)

    def copy(start: int) -> None:
        count = min(SLICE_BYTES, size - start)
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
            if os.preadv(source, [host.numpy().data], start) != count:
                raise OSError(f"{given.source} ends before byte {start + count}")
            there = host.to("cuda", non_blocking=True)
            back = torch.empty(count, dtype=torch.uint8, pin_memory=True)
            back.copy_(there, non_blocking=True)
            torch.cuda.current_stream().synchronize()
        written.write_at(back.numpy().data, start)

    with ThreadPoolExecutor(given.threads) as pool:
        for _ in pool.map(copy, range(0, size, SLICE_BYTES)):
            pass
    written.commit()


if __name__ == "__main__":
    main()
