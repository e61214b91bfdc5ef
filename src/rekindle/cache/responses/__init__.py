"""What the Responses API stores."""
