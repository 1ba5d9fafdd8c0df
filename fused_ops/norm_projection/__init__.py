"""RMSNorm, quantization and the projection of the normed rows in one kernel."""
