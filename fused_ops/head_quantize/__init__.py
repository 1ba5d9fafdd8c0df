"""Rows of several heads to MXFP8 with one exponent a head: the seeds' queries."""
