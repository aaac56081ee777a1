"""What the compiled kernels look like, without a GPU."""
