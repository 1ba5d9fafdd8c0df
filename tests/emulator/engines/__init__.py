"""Engines: one file per hardware unit. See ``registry.py`` for the protocol."""
