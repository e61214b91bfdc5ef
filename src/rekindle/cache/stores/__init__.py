"""What disk and shared store have in common."""
