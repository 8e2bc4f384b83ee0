"""What a run needs, before it runs."""
