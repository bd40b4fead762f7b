"""Ahead-of-time build: every kernel variant to a cubin, with a manifest and a C++ table of the same facts.

`python -m jax_grouped_gemm.aot --out DIR [--jobs N]`; needs the CuTe DSL, no GPU. See docs/architecture.md.
"""
