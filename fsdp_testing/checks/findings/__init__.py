"""What is known of a failure: its record, the rule that recognises it, the script that shows it."""
