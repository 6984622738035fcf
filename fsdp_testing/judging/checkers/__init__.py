"""Does what was observed agree with what was expected? Pure functions of recorded values: no ranks, no clock."""
