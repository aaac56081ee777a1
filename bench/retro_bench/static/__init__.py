"""Static metrics of the compiled kernels, read without a GPU."""
