"""Where the time of a request goes, by stages of the server and its engine."""
