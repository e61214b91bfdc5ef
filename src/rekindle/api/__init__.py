"""HTTP and the wire formats. `chat` sees only neutral values."""
