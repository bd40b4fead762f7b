"""The build's command."""

import argparse
import os
import pathlib
import time

from .build import build


def main():
    parser = argparse.ArgumentParser(
        prog="python -m jax_grouped_gemm.aot", description="Compiles every kernel variant to a cubin."
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the products")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: the processors)")
    arguments = parser.parse_args()
    started = time.monotonic()
    build(arguments.out, arguments.jobs)
    print(f"done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
