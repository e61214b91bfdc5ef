"""Recorded traffic sent again: read, sent in its shape, measured, held against the floor, told."""
