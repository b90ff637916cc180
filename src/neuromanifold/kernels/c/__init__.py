"""Kernels for a CPU, in C, compiled when they are first needed; `kernels.dispatch` chooses them.

square.c  Σ_n (Σ_t left ⊗ right)², for linear layers and convolutions
probe.c   the deflated probe from logits and noise

The module beside each hands it tensors; `build` compiles and loads.
"""
