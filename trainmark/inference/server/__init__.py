"""A server for trained models: JSON of its own, and KServe v2 (Triton) over HTTP and gRPC.

models.py      the models that are served: loading, versions, live reload
batching.py    requests that wait for a model, and are scored together
bodies.py      what HTTP requests may hold: bodies, limits of time and memory
own_form.py    requests and answers in JSON of our own
tensors.py     those of the v2 protocol over HTTP: JSON, and binary tensors behind it
asgi.py        HTTP as uvicorn hands it over, and which function answers what
web.py         endpoints over HTTP; v2_web.py: those of the v2 protocol
rpc.py         the v2 protocol over gRPC; rpc_messages.py: its messages
metrics.py     counts and times for Prometheus
limits.py      what is refused, with which status; keys.py: who may ask
process.py     start, TLS, signals and the end; listening.py: at which address;
               http_protocol.py: connections that take too long
"""
