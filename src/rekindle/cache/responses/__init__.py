"""The responses that the Responses API stores."""
