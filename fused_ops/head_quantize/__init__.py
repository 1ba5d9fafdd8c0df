"""Rows of several heads to MXFP8 with one exponent a head, under which a product's sum fits FP16: the seeds' queries."""
