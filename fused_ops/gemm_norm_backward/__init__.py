"""Backward of key projection and RMSNorm from FP8 gradients."""
