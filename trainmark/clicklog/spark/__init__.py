"""The same bytes as the embedded engine makes, on a Spark cluster."""
