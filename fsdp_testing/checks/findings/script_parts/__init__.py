"""The parts of scripts of findings: modules that need torch alone, whose text is copied into each script."""
