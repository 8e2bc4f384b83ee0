"""Text to tokens: what lies on disk between a corpus and a workload."""
