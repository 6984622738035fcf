"""Look for divergences that nobody wrote a test for: campaigns of random cases, shrinking, replay, findings."""
