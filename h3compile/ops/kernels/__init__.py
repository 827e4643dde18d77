"""Triton sources of the operators; imported only where kernels are compiled or interpreted."""
