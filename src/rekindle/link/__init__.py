"""The link between the server and an engine process: messages, frames, the activity page."""
