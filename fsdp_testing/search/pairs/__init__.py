"""Every pair of traits: legal cases that contain each possible pair, and the results."""
