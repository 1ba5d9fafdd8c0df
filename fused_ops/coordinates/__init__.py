"""Coordinates of a head's queries and keys in which E4M3 loses least of a score."""
