"""Kernels for a GPU, in Triton; `kernels.dispatch` chooses them and imports them when they are first needed.

product       linear layers, 1×1 and other convolutions as products
convolution   k×k convolutions without writing out windows (tiles: their sizes; images: how operands lie in memory)
depthwise     one channel at a time
norms         scales and shifts of BatchNorm
pack          float32 as scaled float16, where TF32 is allowed
probe         Hutchinson probes
"""
