"""Rows, tables and pictures of a run."""
