"""Kernels for GPUs (Triton) and CPUs (C); `dispatch` decides which one runs."""
