"""Training of low-bit models for one and several tokens at once, on PyTorch; no TVM in it."""
