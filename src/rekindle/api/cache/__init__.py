"""What is cached, and what would be found: endpoints of our own."""
