"""Kernels for a GPU, in Triton; `kernels.dispatch` chooses them and imports them when they are first needed.

product       linear layers, 1×1 and other convolutions as products
convolution   k×k convolutions without writing out windows (tiles: their sizes; images: how operands lie in memory)
depthwise     one channel at a time
rows          embeddings
norms         scales and shifts
pack          float32 as scaled float16, where TF32 is allowed
probe, lower  Hutchinson probes of F and of its lower envelope (probing: what both share)
"""
