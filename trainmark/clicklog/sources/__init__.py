"""Sources: files of several formats, read as rows of integers and numbers."""
