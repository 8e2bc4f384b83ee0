"""Tables spread over ranks: who sends which ids and rows to whom."""
