"""Saved runs as tables: reading, comparing, figures."""
