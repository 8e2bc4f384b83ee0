"""What the command line's verbs do around a run; `cli.py` only names them."""
