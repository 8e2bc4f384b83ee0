"""What a trained model is for: how long it takes to predict, and predictions over HTTP.

options.py   the flags of both
latency.py   `infer`; figures.py: inference.json
serving.py   `serve`: finds the model; server.py: answers over HTTP
"""
