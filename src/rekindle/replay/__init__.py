"""Recorded traffic, sent again to servers and compared with the floor."""
