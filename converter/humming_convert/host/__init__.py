"""Two ways to run Humming's operators: its own kernels on a GPU, or this package's native code on a CPU."""
