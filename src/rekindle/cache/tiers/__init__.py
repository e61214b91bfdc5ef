"""Where the bytes live: one file per store, four verbs each."""
