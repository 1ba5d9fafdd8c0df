"""Low-precision attention core: the MXFP8 format, its layouts, and jagged block-scaled attention, forward and backward."""
