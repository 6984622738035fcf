"""Full parameters in users' hands, and how their edits are kept."""
