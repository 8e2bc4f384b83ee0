"""Llama-3: a language model, trained from tokenised text over pipeline x data x tensor ranks."""
