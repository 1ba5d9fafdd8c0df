"""A projection whose epilogue quantizes."""
