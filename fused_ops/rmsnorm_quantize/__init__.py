"""RMSNorm with MXFP8 output, plain or centred per sequence."""
