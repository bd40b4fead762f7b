"""CuTe DSL kernels. Imported at build time only: nothing at run time imports this package."""
