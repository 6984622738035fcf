"""Findings: the record of a failure, the rule that recognises it, the script that shows it."""
