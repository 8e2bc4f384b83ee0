# A server for an exported model. From the root of the repository:
#   docker build -t trainmark-serve -f docker/serve.Dockerfile .
#   docker run -p 8000:8000 -p 8001:8001 -v "$PWD/models":/models:ro trainmark-serve
# Versions are those of constraints.txt.
FROM python:3.11.13-slim-bookworm
LABEL trainmark.torch="2.13.0" \
      trainmark.uvicorn="0.54.0" \
      trainmark.grpcio="1.85.1"

WORKDIR /opt/trainmark
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY trainmark trainmark
RUN pip install --no-cache-dir --constraint constraints.txt '.[fast,serve,text]'

# Nothing is written but what numba compiles, which stays in the home of a user without rights.
RUN useradd --create-home server
USER server
WORKDIR /home/server
EXPOSE 8000 8001
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/ready')"]
ENTRYPOINT ["trainmark", "serve", "--host", "0.0.0.0", "--port", "8000", "--grpc-port", "8001", "--reload-every", "10"]
CMD ["clicks=/models/clicks"]
