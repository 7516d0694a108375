"""Triton kernels for CUDA."""
