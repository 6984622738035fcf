"""Full parameters in users' hands, and what becomes of their edits."""
