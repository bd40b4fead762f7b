"""`python -m jax_grouped_gemm [info] [--json]`: what is installed, what this machine has, what a call would use."""

import argparse

from jax_grouped_gemm import info


def main():
    parser = argparse.ArgumentParser(prog="python -m jax_grouped_gemm", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["info"], default="info")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    arguments = parser.parse_args()
    print(info.as_json() if arguments.json else info.as_text())


if __name__ == "__main__":
    main()
