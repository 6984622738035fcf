"""Where units meet the autograd graph: what it holds of them, the hooks on it, and what it saves of their parameters."""
