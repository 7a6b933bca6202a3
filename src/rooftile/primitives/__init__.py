"""What the kernels of several ops are built from: Triton functions that are inlined into them."""
