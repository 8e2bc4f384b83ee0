"""What a trained model is for: how long it takes to predict, predictions for files, and a server.

options.py   the flags of all three
latency.py   `infer`; figures.py: inference.json
predict.py   `predict`: the rows of files; scored_parts.py: what is done of them, and the output
serving.py   `serve`: finds the models; server/: answers over HTTP and gRPC
"""
